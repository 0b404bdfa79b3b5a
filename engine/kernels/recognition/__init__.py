"""Recognition of what a model's modules compute.

Their own code runs on made-up inputs.
"""
