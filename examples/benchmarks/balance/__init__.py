"""Benchmark of the balance of experts, with a model whose load is skewed."""
