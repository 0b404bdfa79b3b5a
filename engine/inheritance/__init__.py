"""KV caches in memory that outlives their instance, and what others take from it."""
