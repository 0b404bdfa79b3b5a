"""A mesh that changes while it works: the real coordinator rules, recovery and agreement, and every fault."""
