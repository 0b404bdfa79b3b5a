"""Reinforcement learning with rollouts from a mesh whose weights change while it serves."""
