"""Folder for ``PYTHONPATH``: KV caches of a mesh are on pretended devices."""
