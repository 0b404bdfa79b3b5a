"""Benchmark of a coordinator and routers with thousands of simulated instances."""
