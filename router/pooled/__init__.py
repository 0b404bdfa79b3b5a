"""Endpoints of pooling models: embeddings, scores, classes."""
