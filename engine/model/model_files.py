"""JSON files of a model's directory, with errors for the user (no torch)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.model.errors import CheckpointError
from engine.model.gguf.directory import SUFFIX


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """Turn errors of unreadable files into messages for the user."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or 'the model'} cannot be read: {reason_of(error)}"
        ) from error


def reason_of(error: Exception) -> str:
    """Text of an error without numbers and paths, where it has one."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """Content of a JSON file; empty if it is not there and not required.

    Raises:
        CheckpointError: it holds no JSON object, or is missing.
    """
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path.parent} has no {path.name}: {_instead(path.parent)}")
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def _instead(directory: Path) -> str:
    """Hint for a directory without config.json: what to give instead."""
    found = sorted(directory.glob(f"*{SUFFIX}"))
    if not found:
        return f"is it a model directory? (A GGUF file of a repository: owner/name/FILE{SUFFIX})"
    names = ", ".join(path.name for path in found)
    return f"give one of its GGUF files as the model ({names}), like {found[0]}"
