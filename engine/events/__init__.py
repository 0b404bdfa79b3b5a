"""KV events in vLLM's form: others can follow prefix caches."""
