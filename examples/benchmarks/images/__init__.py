"""Benchmarks of requests with images."""
