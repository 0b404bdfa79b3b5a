"""Benchmark models in quantised formats."""
