"""Reads the tensors of a checkpoint, and their ranges, that one shard keeps.

transformers converts checkpoints to its own layout while it loads them (experts one by one on disk, stacked
in memory, gate and up packed). The conversion works on whatever it is given, so a worker gives it its own
parts under the names on disk.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from engine.model.checkpoint import CheckpointError
from engine.model.expert_weights import ExpertReader, expert_modules
from engine.model.sharding.shard import ShardedClass

CPU = torch.device("cpu")
LAYOUT_KEEPING = {"MergeModulelist", "Concatenate"}
"""Conversions that commute with cutting."""


def all_tensors(files: Sequence[Any]) -> dict[str, Any]:
    """All tensors of opened files by name, as slices that read nothing yet.

    They are for files that transformers does not find by itself, or cannot read.
    """
    return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118


def read_shard(
    sharded: ShardedClass,
    files: Sequence[Any],
    key_mapping: dict[str, str] | None,
    device: torch.device = CPU,
) -> dict[str, torch.Tensor]:
    """All tensors of opened files that the shard needs, by their names on disk.

    Each is moved to ``device`` as it is read.

    Raises:
        CheckpointError: the checkpoint's layout cannot be cut.
    """
    reader = _Reader(sharded, key_mapping)
    tensors: dict[str, torch.Tensor] = {}
    for opened in files:
        for name in opened.keys():  # noqa: SIM118 (safe_open is no dict)
            before = len(tensors)
            reader.take(opened, name, tensors)
            for new in [*islice(reversed(tensors), len(tensors) - before)]:
                tensors[new] = tensors[new].to(device)
    return tensors


class _Reader:
    """Decides tensor by tensor what of a checkpoint a shard needs."""

    def __init__(self, sharded: ShardedClass, key_mapping: dict[str, str] | None) -> None:
        whole = sharded.whole
        transforms = get_model_conversion_mapping(whole, key_mapping)
        self._converters = [item for item in transforms if isinstance(item, WeightConverter)]
        self._renamings = [item for item in transforms if not isinstance(item, WeightConverter)]
        self._prefix = whole.base_model_prefix
        self._known = whole.state_dict()
        self._targets = sharded.targets
        self._kept = sharded.kept
        self._cuts = sharded.done.cuts
        layers = expert_modules(whole)
        self._experts: ExpertReader | None = None
        self._spread: set[str] = set()
        if sharded.share is not None:
            self._experts = ExpertReader(whole, layers, [sharded.share.experts] * len(layers))
            self._spread = set(self._experts.wanted)
        self._ignored = [re.compile(each) for each in whole._keys_to_ignore_on_load_unexpected or ()]
        self._head = _name_of(whole, whole.get_output_embeddings()) if sharded.ties_head else None
        self._embedding = _name_of(whole, whole.get_input_embeddings())

    def take(self, opened: Any, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Read what is needed of one tensor of a file."""
        target, pattern = self._target(name)
        if target == self._embedding and self._head is not None:
            tensors.setdefault(self._head, self._part(opened, name, self._head))
        if target in self._spread:
            if target in self._kept and self._experts is not None:
                self._experts.take(opened, name, target, tensors)
        elif target in self._kept:
            if pattern is not None and target in self._cuts:
                self._check_conversion(name, pattern)
            tensors[name] = self._part(opened, name, target)
        elif target not in self._known and not any(each.search(target) for each in self._ignored):
            tensors[name] = opened.get_tensor(name)  # unknown: transformers reports it

    def _target(self, name: str) -> tuple[str, str | None]:
        if name not in self._targets:
            self._targets[name] = rename_source_key(
                name, self._renamings, self._converters, self._prefix, self._known
            )
        return self._targets[name]

    def _part(self, opened: Any, name: str, target: str) -> torch.Tensor:
        cut = self._cuts.get(target)
        if cut is None:
            whole: torch.Tensor = opened.get_tensor(name)
            return whole
        source = opened.get_slice(name)
        return cut.take(source, tuple(source.get_shape()))

    def _check_conversion(self, name: str, pattern: str) -> None:
        for converter in self._converters:
            if pattern in converter.source_patterns:
                kinds = {type(operation).__name__ for operation in converter.operations}
                if not kinds <= LAYOUT_KEEPING:
                    raise CheckpointError(
                        f"{name} is stored in a layout that is not cut ({', '.join(sorted(kinds))}): save "
                        "the checkpoint with this version of transformers, or use -tp 1"
                    )


def _name_of(model: Any, module: Any) -> str:
    """Name of a module's weight."""
    return next(f"{path}.weight" for path, each in model.named_modules() if each is module)


def random_shard(sharded: ShardedClass) -> dict[str, torch.Tensor]:
    """Random matrices in place of a checkpoint's.

    Those that every rank holds are equal on all of them. What is no matrix is left to the model's own
    initialisation.
    """
    with torch.device("meta"):
        model = sharded.model_class(sharded.whole.config)
    scale = float(getattr(model.config.get_text_config(), "initializer_range", 0.02))
    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            rank = sharded.shard.rank if name in sharded.done.cuts else 0
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{rank}".encode()))
            tensors[name] = torch.empty(parameter.shape).normal_(0.0, scale, generator=generator)
    return tensors
