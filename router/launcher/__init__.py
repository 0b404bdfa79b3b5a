"""Launcher of one ``serve``: checks, start, supervision and end of its processes."""
