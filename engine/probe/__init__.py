"""Probe processes that need torch and answer in JSON.

``lockstep doctor`` starts them, and loads no torch itself.
"""
