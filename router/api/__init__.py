"""The endpoints that generate: completions, chat, responses, messages."""
