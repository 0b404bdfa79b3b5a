"""Low-rank adapters: their files in PEFT's format, and their places in a model."""
