"""A deterministic simulator of the agreement: the real protocol objects, a virtual clock, chance."""
