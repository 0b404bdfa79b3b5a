"""Check of saved answers against a checkpoint, in one process without a mesh: ``lockstep verify``."""
