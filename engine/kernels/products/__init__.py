"""Products of rows and weights: how weights are laid out, compressed and quantised, and MLPs."""
