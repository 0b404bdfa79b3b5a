"""Meshes whose low-rank adapters change while they serve."""
