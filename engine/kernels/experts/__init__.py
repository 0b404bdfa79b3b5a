"""Mixtures of experts: recognition of routers and experts, their weights, and the operations."""
