"""Reads a rank's share of a mixture-of-experts checkpoint, or some more experts.

A share is the rank's experts and all that is not an expert. More experts are for a model that serves already.

transformers converts checkpoints to its own layout while it loads them (experts one by one on disk, fused in
memory). That conversion works on whatever experts it is given, so a rank gives it only its own, numbered
anew, read one tensor or slice at a time; the bytes of the others are never read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

from engine.config.quantization import OnlineName
from engine.model.checkpoint import CheckpointError, ReadingStopped
from engine.model.quantization.attached import ATTRIBUTE as CODES
from engine.model.quantization.attached import readers_of
from engine.model.text_parts import NAMES, OTHER_MODALITIES
from engine.model.weight_files import open_weights
from parallel.placement import Placement

ROW_NAMES = "_lockstep_row_names"
"""Attribute with names of the parameters that have a row per expert."""
ONE_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


class ExpertShare(msgspec.Struct, frozen=True):
    """A rank's share of the experts: placement and rank."""

    placement: Placement
    rank: int

    @property
    def experts(self) -> list[int]:
        return self.placement.experts_of(self.rank)


def expert_modules(model: Any) -> dict[str, Any]:
    """Modules that hold the fused experts of a layer, by path, in layer order."""
    return {
        path: module
        for path, module in model.named_modules()
        if hasattr(module, "num_experts") and hasattr(module, "is_concatenated")
    }


def spread_modules(model: Any) -> dict[str, Any]:
    """:func:`expert_modules` of a model whose experts are to be spread.

    Raises:
        CheckpointError: this family has no such modules.
    """
    layers = expert_modules(model)
    if not layers:
        raise CheckpointError(
            f"{type(model).__name__}: its experts do not go through transformers' experts interface, so they "
            "cannot be spread over instances: use --no-enable-expert-parallel"
        )
    return layers


def keep_experts(module: Any, count: int) -> None:
    """Shrink an experts module to room for so many experts."""
    for name, parameter in expert_parameters(module):
        local = parameter.new_empty(count, *parameter.shape[1:])
        setattr(module, name, torch.nn.Parameter(local, requires_grad=False))
    module.num_experts = count


def expert_parameters(module: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters of an experts module that have a row per expert, by name.

    Names are found at the first call: later, another thread may be about to change the number of experts.
    """
    names = module.__dict__.get(ROW_NAMES)
    if names is None:
        names = module.__dict__[ROW_NAMES] = tuple(
            name
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.shape[0] == module.num_experts
        )
    return [(name, getattr(module, name)) for name in names]


def read_experts(
    model: Any,
    directory: Path,
    experts: Sequence[Sequence[int]],
    should_stop: Callable[[], bool] = lambda: False,
    online: OnlineName | None = None,
) -> dict[str, torch.Tensor]:
    """Read some experts by layer: parameter -> [experts of its layer, ...], in their order.

    Only their bytes are read; the model, which may hold other ones, is not changed. Parameters of layers of
    which none are wanted are left out. Where they are quantised, the tensors know their codes.

    ``online``: how plain weights are quantised.

    Raises:
        CheckpointError: the checkpoint lacks some of them (any more).
        ReadingStopped: ``should_stop``, which is asked before each tensor, returned True.
    """
    layers = expert_modules(model)
    reader = ExpertReader(model, layers, experts)
    found = reader.read_experts(directory, model.dtype, should_stop, online)
    wanted = {name: len(of_layer) for name, of_layer in reader.wanted.items() if of_layer}
    for name, count in wanted.items():
        if name not in found or found[name].shape[0] != count:
            raise CheckpointError(f"{directory} lacks experts of {name}: has it changed since the start?")
    return {name: found[name] for name in wanted}


@contextmanager
def only_experts_of(
    model_class: Any, config: Any, share: ExpertShare, files: Sequence[Any]
) -> Iterator[dict[str, torch.Tensor]]:
    """Context in which models of this class are made with the share's experts only.

    Yields their weights.

    Raises:
        CheckpointError: this family has no expert layers that could be spread.
    """
    with torch.device("meta"):
        whole = model_class(config)
    layers = spread_modules(whole)
    kinds = {type(module) for module in layers.values()}
    originals = {kind: kind.__init__ for kind in kinds}
    try:
        for kind in kinds:
            kind.__init__ = _smaller(originals[kind], share)
        yield ExpertReader(whole, layers, [share.experts] * len(layers)).read(files)
    finally:
        for kind, original in originals.items():
            kind.__init__ = original


def _smaller(original: Any, share: ExpertShare) -> Any:
    """Initialiser of experts modules that makes room for the share's experts only."""

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        keep_experts(self, len(share.experts))

    return initialise


class _Shapes:
    """Stand-in for a model with some experts when a conversion asks for shapes."""

    def __init__(self, known: Mapping[str, torch.Tensor], wanted: Mapping[str, Sequence[int]]) -> None:
        """``wanted``: experts by parameter, for those that have a row for each."""
        self._known = known
        self._wanted = wanted

    def get_parameter(self, name: str) -> torch.Tensor:
        """Parameter without memory, in the shape that the share's module has."""
        rows, *rest = self._known[name].shape
        return torch.empty(len(self._wanted[name]) if name in self._wanted else rows, *rest, device="meta")


class ExpertReader:
    """Decides tensor by tensor what of a checkpoint some experts of a model need.

    The model may hold any number of them itself.
    """

    def __init__(self, model: Any, layers: dict[str, Any], experts: Sequence[Sequence[int]]) -> None:
        """``experts``: by layer."""
        transforms = get_model_conversion_mapping(model, NAMES)  # names that only language parts have
        self._converters = [item for item in transforms if isinstance(item, WeightConverter)]
        self._renamings = [item for item in transforms if not isinstance(item, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._known = model.state_dict()
        self.wanted: dict[str, Sequence[int]] = {
            f"{path}.{name}": of_layer
            for (path, module), of_layer in zip(layers.items(), experts, strict=True)
            for name, _ in expert_parameters(module)
        }
        """Experts to read by parameter."""

    def read(self, files: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Read the experts and all that is no expert.

        Names are those that transformers expects on disk.
        """
        tensors: dict[str, torch.Tensor] = {}
        for opened in files:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no dict)
                target = self._target(name)[0]
                if target in self.wanted:
                    self.take(opened, name, target, tensors)
                elif target in self._known or not OTHER_MODALITIES.search(name):
                    tensors[name] = opened.get_tensor(name)
        return tensors

    def read_experts(
        self,
        directory: Path,
        dtype: torch.dtype,
        should_stop: Callable[[], bool],
        online: OnlineName | None,
    ) -> dict[str, torch.Tensor]:
        """Read experts alone, converted: parameter -> [experts, ...]."""
        tensors: dict[str, torch.Tensor] = {}
        with open_weights(directory, dtype, online) as files:
            for opened in files:
                for name in opened.keys():  # noqa: SIM118 (safe_open is no dict)
                    if should_stop():
                        raise ReadingStopped
                    target = self._target(name)[0]
                    if self.wanted.get(target):
                        self.take(opened, name, target, tensors)
        converted = self._convert(tensors)
        readers = readers_of(files, self._target, self._converters, self.wanted)
        for name, reader in readers.items():
            setattr(converted[name], CODES, reader)
        return converted

    def _target(self, name: str) -> tuple[str, str | None]:
        """Parameter of a tensor on disk, and its converter's pattern if it has one."""
        target: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._known
        )
        return target

    def _convert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert as transformers' ``convert_and_load_state_dict_in_model``, without a model to fill."""
        by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        converted: dict[str, torch.Tensor] = {}
        running: dict[str, WeightConverter] = {}
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = self._target(name)
            if pattern is None:
                converted[target] = tensors[name]
                continue
            converter = running.setdefault(target, deepcopy(by_pattern[pattern]))
            converter.add_tensor(target, name, pattern, lambda name=name: tensors[name])
        shapes = _Shapes(self._known, self.wanted)
        for target, converter in running.items():
            for name, value in converter.convert(target, model=shapes).items():
                converted[name] = value[0] if isinstance(value, list) else value
        return converted

    def take(self, opened: Any, name: str, target: str, tensors: dict[str, torch.Tensor]) -> None:
        """Read the experts' part of one tensor of a file.

        The tensor is of ``target``, a parameter of an experts module.
        """
        match, experts = ONE_EXPERT.search(name), self.wanted[target]
        if match is None:
            tensors[name] = _slices(opened.get_slice(name), list(experts))
            return
        if int(match[1]) in experts:
            local = experts.index(int(match[1]))
            tensors[f"{name[: match.start(1)]}{local}{name[match.end(1) :]}"] = opened.get_tensor(name)


def _slices(fused: Any, experts: Sequence[int]) -> torch.Tensor:
    """Some experts' rows of a tensor that holds all.

    Neighbours are read together.
    """
    if experts == list(range(experts[0], experts[-1] + 1)):
        neighbours: torch.Tensor = fused[experts[0] : experts[-1] + 1]
        return neighbours
    return torch.cat([fused[expert : expert + 1] for expert in experts])
