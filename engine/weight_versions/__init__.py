"""Weight versions of an instance: read in the background, swapped between two steps."""
