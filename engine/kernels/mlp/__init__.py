"""MLPs: recognition, weights and the operations that compute them."""
