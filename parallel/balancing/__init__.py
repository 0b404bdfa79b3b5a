"""Balancing of expert loads: copies of busy experts, and the ranks that hold them (pure)."""
