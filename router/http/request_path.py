"""A request's path, without what proxies and clients add to it (pure)."""

from __future__ import annotations


def prefix_of(root_path: str) -> str:
    """Prefix of ``--root-path``: empty, or with a leading slash and no trailing one."""
    name = root_path.strip("/")
    return f"/{name}" if name else ""


def without_prefix(path: str, root_path: str) -> str:
    """A path without the prefix, whether the proxy removed it or not."""
    prefix = prefix_of(root_path)
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


def without_slash(path: str) -> str:
    """Path without a slash at its end, as routes are named."""
    return path[:-1] if len(path) > 1 and path.endswith("/") else path
