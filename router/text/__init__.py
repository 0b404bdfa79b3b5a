"""Token ids to text and back: tokenizers, chat templates, stop strings."""
