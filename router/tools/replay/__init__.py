"""``lockstep replay``: saved answers, computed again from their capsules and compared to the bit."""
