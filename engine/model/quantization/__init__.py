"""Quantised checkpoints: what their config.json says, and their weights in the model's data type."""
