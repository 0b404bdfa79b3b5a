"""Meshes that a training loop steers: weights in parts, sleep."""
