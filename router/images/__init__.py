"""Images of requests: found in messages, prepared in a process of their own, placed in the prompt."""
