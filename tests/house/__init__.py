"""Measures of the code's structure, and what they may be at most."""
