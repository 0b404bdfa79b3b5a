"""One instance from registration to its end: start, what runs beside its steps, stop."""
