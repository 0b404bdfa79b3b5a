"""A table of model families: what serves each of them exactly, and what is refused why."""
