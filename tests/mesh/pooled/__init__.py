"""Meshes of pooling models."""
