"""KV blocks that travel between instances, by the names of their content."""
