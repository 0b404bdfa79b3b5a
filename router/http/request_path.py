"""A request's path, without what proxies and clients add to it (pure)."""

from __future__ import annotations


def prefix_of(root_path: str) -> str:
    """What ``--root-path`` puts before each path: empty, or with a slash at its beginning alone."""
    name = root_path.strip("/")
    return f"/{name}" if name else ""


def without_prefix(path: str, root_path: str) -> str:
    """A path without the prefix, whether the proxy removed it or not."""
    prefix = prefix_of(root_path)
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


def without_slash(path: str) -> str:
    """A path as it is known here: a slash at its end means nothing."""
    return path[:-1] if len(path) > 1 and path.endswith("/") else path
