"""A model from its checkpoint: reading, sharding, checking."""
