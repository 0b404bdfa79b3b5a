"""Shadow checks: requests that another instance computes again, to compare the answers."""
