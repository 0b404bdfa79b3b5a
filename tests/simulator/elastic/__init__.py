"""A mesh that changes while it works, with every fault.

The rules of the coordinator, recovery and agreement are the real ones.
"""
