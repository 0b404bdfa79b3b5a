"""Connections between the members of a group: meeting, handshake, sockets.

This package loads no torch.
"""
