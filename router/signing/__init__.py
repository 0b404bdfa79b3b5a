"""Signatures of capsules: their canonical form, and the keys."""
