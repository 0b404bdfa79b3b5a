"""Pooling models: what a checkpoint answers with in place of tokens, and how."""
