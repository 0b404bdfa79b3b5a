"""Images of requests: found, prepared in another process, placed in the prompt."""
