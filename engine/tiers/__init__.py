"""KV blocks in files, behind the cache in memory: they outlive their instance."""
