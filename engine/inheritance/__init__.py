"""KV cache inheritance: memory that outlives a dead instance, and copying from it."""
