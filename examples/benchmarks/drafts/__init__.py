"""Benchmarks of drafts: each method against none."""
