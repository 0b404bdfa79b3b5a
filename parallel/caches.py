"""Where files are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(name: str) -> Path:
    """Of this user, for one kind of files; it may not be there yet.

    Raises:
        OSError: this user has no home.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "lockstep" / name
    except RuntimeError as error:  # a user id without a name, as in some containers
        raise OSError(f"there is no place for a cache: set HOME or XDG_CACHE_HOME ({error})") from error
