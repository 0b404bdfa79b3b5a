"""Norms of rows: recognition, weights and the operations that compute them."""
