"""Layers with a recurrent state: their state in memory, and the operations that compute them."""
