"""A table of model families: exact layouts, and refusals with their reasons."""
