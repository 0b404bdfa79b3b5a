"""Reading one rank's share of a mixture-of-experts checkpoint: its experts and all that is not an expert.

transformers converts checkpoints to its own layout while it loads them (experts one by one on disk, fused
in memory). That conversion works on whatever experts it is given, so a rank gives it only its own, numbered
anew, read one tensor or slice at a time; the bytes of the others are never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from engine.checkpoint import CheckpointError, weight_files
from parallel.placement import Placement

ONE_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


class ExpertShare(msgspec.Struct, frozen=True):
    """Which experts one rank holds."""

    placement: Placement
    rank: int

    @property
    def experts(self) -> list[int]:
        return self.placement.experts_of(self.rank)


def expert_modules(model: Any) -> dict[str, Any]:
    """The modules that hold the fused experts of a layer, by path, in the order of layers."""
    return {
        path: module
        for path, module in model.named_modules()
        if hasattr(module, "num_experts") and hasattr(module, "_is_expert_parallel")
    }


@contextmanager
def only_experts_of(model_class: Any, config: Any, share: ExpertShare) -> Iterator[dict[str, torch.Tensor]]:
    """While it lasts, models of this class are made with the share's experts only; gives their weights.

    Raises:
        CheckpointError: this family has no expert layers that could be spread.
    """
    with torch.device("meta"):
        whole = model_class(config)
    layers = expert_modules(whole)
    if not layers:
        raise CheckpointError(
            f"{model_class.__name__}: its experts do not go through transformers' experts interface, so they "
            "cannot be spread over instances: use --no-enable-expert-parallel"
        )
    kinds = {type(module) for module in layers.values()}
    originals = {kind: kind.__init__ for kind in kinds}
    try:
        for kind in kinds:
            kind.__init__ = _smaller(originals[kind], share)
        yield _Reader(whole, layers, share).read(Path(config._name_or_path))
    finally:
        for kind, original in originals.items():
            kind.__init__ = original


def _smaller(original: Any, share: ExpertShare) -> Any:
    """An initialiser that leaves a module with the share's experts."""

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name, parameter in list(self.named_parameters(recurse=False)):
            if parameter.shape[0] == self.num_experts:
                local = parameter.new_empty(len(share.experts), *parameter.shape[1:])
                setattr(self, name, torch.nn.Parameter(local, requires_grad=False))
        self.num_experts = len(share.experts)

    return initialise


class _Reader:
    """Decides tensor by tensor what of a checkpoint a share needs."""

    def __init__(self, whole: Any, layers: dict[str, Any], share: ExpertShare) -> None:
        transforms = get_model_conversion_mapping(whole)
        self._converters = [item for item in transforms if isinstance(item, WeightConverter)]
        self._renamings = [item for item in transforms if not isinstance(item, WeightConverter)]
        self._prefix = whole.base_model_prefix
        self._known = whole.state_dict()
        self._expert_parameters = {
            f"{path}.{name}"
            for path, module in layers.items()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.shape[0] == module.num_experts
        }
        self._local = {expert: number for number, expert in enumerate(share.experts)}

    def read(self, directory: Path) -> dict[str, torch.Tensor]:
        """All tensors that the share needs, under the names that transformers expects on disk."""
        tensors: dict[str, torch.Tensor] = {}
        for file in weight_files(directory):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (safe_open is no dict)
                    self._take(opened, name, tensors)
        return tensors

    def _take(self, opened: Any, name: str, tensors: dict[str, torch.Tensor]) -> None:
        target, _ = rename_source_key(name, self._renamings, self._converters, self._prefix, self._known)
        if target not in self._expert_parameters:
            tensors[name] = opened.get_tensor(name)
            return
        match = ONE_EXPERT.search(name)
        if match is None:
            tensors[name] = self._slices(opened.get_slice(name))
            return
        local = self._local.get(int(match[1]))
        if local is not None:
            tensors[f"{name[: match.start(1)]}{local}{name[match.end(1) :]}"] = opened.get_tensor(name)

    def _slices(self, fused: Any) -> torch.Tensor:
        """The share's rows of a tensor that holds all experts; neighbours are read together."""
        experts = list(self._local)
        if experts == list(range(experts[0], experts[-1] + 1)):
            neighbours: torch.Tensor = fused[experts[0] : experts[-1] + 1]
            return neighbours
        return torch.cat([fused[expert : expert + 1] for expert in experts])
