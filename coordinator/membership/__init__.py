"""Membership: which instances are in the mesh, and which groups they step in (pure)."""
