"""Simulator of KV blocks that travel, with every delay and fault drawn."""
