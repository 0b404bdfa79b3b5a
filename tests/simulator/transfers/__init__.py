"""Simulator of KV blocks that travel: the real deciding parts, with every delay and fault drawn."""
