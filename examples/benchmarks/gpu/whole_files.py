"""Files that are never seen half written, whatever cuts a command off."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content at once."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)
