"""Attention: recognition of heads, rotation and latents, their weights, and the operations."""
