"""Opened files of a checkpoint, plain, quantised or GGUF."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from engine.config.quantization import OnlineName
from engine.model.checkpoint import CheckpointError, format_of_weights
from engine.model.gguf.configs import METHOD
from engine.model.gguf.directory import WEIGHTS
from engine.model.quantization.online import OnlineFiles
from engine.model.quantization.view import QuantizedFiles
from engine.model.weight_set import INDEX_FILE, weight_files


class OpenFile(Protocol):
    """Opens a file of weights, which is then an object as safetensors' ``safe_open`` gives it."""

    def __call__(self, path: Path) -> AbstractContextManager[Any]: ...


MAPPED: OpenFile = partial(safe_open, framework="pt")
"""Files that are mapped into memory, and must not change while tensors are used."""


@contextmanager
def open_weights(
    directory: Path,
    dtype: torch.dtype,
    online: OnlineName | None = None,
    source: Path | None = None,
    open_file: OpenFile = MAPPED,
) -> Iterator[list[Any]]:
    """The open files of a checkpoint: objects as safetensors' ``safe_open`` gives them.

    Quantised matrices are in ``dtype``; all files are one then. ``online``: how plain ones are quantised.
    ``source``: another directory that has the files, in the format of this one.

    Raises:
        CheckpointError: files are missing, two have a tensor of one name, or a quantised matrix is not whole.
    """
    form, homes = format_of_weights(directory), dict[str, Path]()
    if form is not None and form.method == METHOD:
        from engine.model.gguf.files import GgufFiles  # needs a package that is an extra

        yield [GgufFiles(directory / WEIGHTS, dtype)]
        return
    with ExitStack() as opened:
        files: list[Any] = []
        for path in weight_files(source or directory):
            files.append(opened.enter_context(open_file(path)))
            for name in files[-1].keys():  # noqa: SIM118 (safe_open is no dict)
                if name in homes:
                    raise CheckpointError(
                        f"{directory} has {name} in both {homes[name].name} and {path.name}: leave the files "
                        f"of one model there, or add a {INDEX_FILE}"
                    )
                homes[name] = path
        if online is not None:
            yield [OnlineFiles(files, online, dtype)]
        else:
            yield files if form is None else [QuantizedFiles(files, form, dtype)]
