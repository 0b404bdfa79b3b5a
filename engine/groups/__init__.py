"""Groups of instances that step in lockstep: formation, agreement, recovery."""
