"""Simulator of views: a real registry, and watchers behind connections that lose and reorder."""
