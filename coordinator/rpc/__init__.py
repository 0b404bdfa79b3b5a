"""Typed messages over ZeroMQ, and keys."""
