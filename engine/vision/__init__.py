"""Encoders of images, and the rows that a stream begins with for them."""
