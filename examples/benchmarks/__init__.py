"""Benchmarks: each a command that compares with a peer or a limit."""
