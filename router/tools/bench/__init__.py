"""``lockstep bench serve``: a load generator for OpenAI-compatible servers, with vLLM's flags and report."""
