"""Drafts: tokens proposed for a request before the model computes them, and their prices."""
