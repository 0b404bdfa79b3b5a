"""KV cache events in vLLM's format, so that external routers can follow prefix caches."""
