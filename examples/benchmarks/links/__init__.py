"""Links between two network namespaces, and benchmarks over them."""
