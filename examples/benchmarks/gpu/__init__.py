"""The first ten minutes on a GPU: what only a device can show."""
