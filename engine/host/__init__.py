"""The host of an instance: memory, cache size, cores, forked processes, late imports."""
