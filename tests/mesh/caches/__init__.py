"""Caches of real instances, with faults planted in them."""
