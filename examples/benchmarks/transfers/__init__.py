"""Benchmarks of KV blocks that move between instances."""
