"""Routes of the HTTP application, and what stands around them."""
