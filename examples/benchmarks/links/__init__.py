"""Benchmarks between two network namespaces: a link with a delay and a rate, and what is measured over it."""
