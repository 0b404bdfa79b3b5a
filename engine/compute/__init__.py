"""One forward pass and the tokens sampled from it."""
