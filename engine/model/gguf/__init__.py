"""GGUF files: headers, model directories made from them, and weights."""
