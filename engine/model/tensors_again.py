"""Reading of other weights for a model that is loaded and computes meanwhile.

What is read is a module of transformers that computes nothing: its tensors are taken out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import modeling_utils

from engine.config import ModelConfig
from engine.model.checkpoint import ModelInfo
from engine.model.expert_weights import ExpertShare
from engine.model.model_class import class_of
from engine.model.module_reading import ModuleReader
from engine.model.sharding.shard import Shard, sharded_class
from engine.model.weight_files import OpenFile
from engine.model.weights import LOADING, read_module

MAKERS: set[Callable[..., Any]] = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
"""Functions that make tensors of torch's default type."""


def read_again(
    info: ModelInfo,
    settings: ModelConfig,
    dtype: torch.dtype,
    shard: Shard,
    source: Path,
    open_file: OpenFile,
    share: ExpertShare | None = None,
    reader_class: type[ModuleReader] = ModuleReader,
) -> Any:
    """A module with the weights of another directory, in the format of the model's own.

    ``share``: the experts that it gets; None: all. ``reader_class``: what of the checkpoint is read.

    Raises:
        CheckpointError: tensors are missing, or of another shape.
    """
    reader = reader_class(info, settings, *class_of(info, settings), dtype, source, open_file)
    sharded, cpu = None, torch.device("cpu")
    if not shard.is_whole:
        sharded = sharded_class(reader.model_class, reader.config, shard, share, whole_states=True)
    with default_type_of_this_thread():
        return read_module(reader, sharded, share, cpu, cpu).eval().requires_grad_(False)


class _DefaultType(TorchFunctionMode):  # type: ignore[misc]
    """Default type of new tensors, in one thread."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MAKERS and kwargs.get("dtype") is None:
            kwargs = kwargs | {"dtype": self._dtype}
        return func(*args, **kwargs)


@contextmanager
def default_type_of_this_thread() -> Iterator[None]:
    """Keep transformers from changing torch's default type, which is one for all threads.

    Steps are computed in others meanwhile.
    """
    before, here = modeling_utils.local_torch_dtype, threading.get_ident()

    def local(dtype: torch.dtype, *names: Any) -> Any:
        if threading.get_ident() != here:
            return before(dtype, *names)
        return _DefaultType(dtype) if dtype.is_floating_point else nullcontext()

    with LOADING:
        modeling_utils.local_torch_dtype = local
        try:
            yield
        finally:
            modeling_utils.local_torch_dtype = before
