"""Packed weights of a loaded model's parameters, for kernels that multiply by them.

transformers turns the tensors of a checkpoint into parameters: it renames them, and stacks experts. What it
was given was widened. Here each parameter learns of which parts of which quantised matrices it was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

from engine.model.quantization.stacks import Matrix
from engine.model.quantization.view import CodedFiles
from engine.model.quantization.weight_codes import Codes

Rows: TypeAlias = "torch.Tensor | slice"
ATTRIBUTE = "lockstep_codes"
"""Attribute of a parameter: how to read its codes."""


class CodesReader:
    """Reader of one parameter's codes: [outputs, inputs], or a stack of experts."""

    def __init__(self, experts: Sequence[Sequence[Matrix]], is_stack: bool) -> None:
        """``experts``: for each the matrices of its outputs, in their order.

        One entry if it is no stack.
        """
        self._experts, self._is_stack = experts, is_stack
        self._kept: Codes | None = None

    def __repr__(self) -> str:
        return f"<CodesReader of {[list(each) for each in self._experts[:1]]} x {len(self._experts)}>"

    @property
    def rounds(self) -> bool:
        """Whether inputs are rounded before they are multiplied by this parameter."""
        rounding = [part.rounding for expert in self._experts for part in expert]
        return bool(rounding) and rounding[0] is not None and len(set(rounding)) == 1

    @classmethod
    def of_experts(cls, experts: Sequence[tuple[CodesReader, int]]) -> CodesReader:
        """Reader of a stack of these: each is one of another reader's."""
        return cls([reader._experts[number] for reader, number in experts], is_stack=True)

    def keep(self, device: torch.device) -> Codes | None:
        """The codes, which stay in memory of this device once they were read."""
        if self._kept is None and (found := self.read()) is not None:
            self._kept = found.to(device)
        return self._kept

    def read(self) -> Codes | None:
        """The codes, from the checkpoint; None where they are not all of one kind."""
        if self._kept is not None:
            return self._kept
        stack = [_joined([part for each in expert for part in _parts(each)], -2) for expert in self._experts]
        if not self._is_stack:
            return stack[0]
        return _joined([_stacked(each) for each in stack], 0)

    def forget(self) -> None:
        """Let go of the codes and their files: nobody will read them again."""
        self._experts, self._kept = (), None


class _Rearranged(CodesReader):
    """Reader of chosen outputs of other weights, joined."""

    def __init__(self, parts: Sequence[tuple[CodesReader, Rows]]) -> None:
        super().__init__([], is_stack=False)
        self._parts = parts

    def __repr__(self) -> str:
        return f"<outputs of {[reader for reader, _ in self._parts]}>"

    @property
    def rounds(self) -> bool:
        """See the base."""
        return all(reader.rounds for reader, _ in self._parts)

    def read(self) -> Codes | None:
        """See the base."""
        return _joined([_rows_of(reader.read(), rows) for reader, rows in self._parts], -2)


def rows_of(weight: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Some outputs of a weight [outputs, inputs], which know their codes."""
    chosen, reader = weight.data[rows], reader_of(weight)
    if reader is not None:
        setattr(chosen, ATTRIBUTE, _Rearranged([(reader, rows)]))
    return chosen


def outputs_of(weight: torch.Tensor, chosen: torch.Tensor, rows: slice) -> torch.Tensor:
    """``chosen``, a view [..., outputs, inputs] of some outputs, which knows their codes."""
    if (reader := reader_of(weight)) is not None:
        setattr(chosen, ATTRIBUTE, _Rearranged([(reader, rows)]))
    return chosen


def in_a_row(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Outputs of several weights joined; they know their codes if all do."""
    joined = torch.cat([weight.data for weight in weights])
    readers = [reader for weight in weights if (reader := reader_of(weight)) is not None]
    if len(readers) == len(weights):
        setattr(joined, ATTRIBUTE, _Rearranged([(reader, slice(None)) for reader in readers]))
    return joined


def reader_of(parameter: torch.Tensor) -> CodesReader | None:
    """Reader of a parameter's codes; None for one that was not quantised."""
    reader: CodesReader | None = getattr(parameter, ATTRIBUTE, None)
    return reader


def forget_codes(parameter: torch.Tensor) -> None:
    """Let go of what a parameter knows of its codes: memory, and open files."""
    reader: CodesReader | None = parameter.__dict__.pop(ATTRIBUTE, None)
    if reader is not None:
        reader.forget()


def without_memory(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's shape with room for one number only."""
    return parameter.data.new_empty(()).expand(parameter.shape)


def codes_of(parameter: torch.Tensor) -> Codes | None:
    """The codes of a parameter; None for one that was not quantised."""
    reader = reader_of(parameter)
    return None if reader is None else reader.read()


def attach_codes(module: Any, files: Sequence[Any], key_mapping: dict[str, str] | None) -> None:
    """Let the parameters of a model know their codes.

    ``files`` are those that it was just read from.
    """
    transforms = get_model_conversion_mapping(module, key_mapping)
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    renamings = [item for item in transforms if not isinstance(item, WeightConverter)]
    parameters = dict(module.named_parameters())

    def target_of(name: str) -> tuple[str, str | None]:
        target: tuple[str, str | None] = rename_source_key(
            name, renamings, converters, module.base_model_prefix, parameters
        )
        return target

    stacks = {name for name, parameter in parameters.items() if parameter.dim() == 3}
    for target, reader in readers_of(files, target_of, converters, stacks).items():
        if target in parameters:
            setattr(parameters[target], ATTRIBUTE, reader)


def readers_of(
    files: Sequence[Any],
    target_of: Callable[[str], tuple[str, str | None]],
    converters: Sequence[Any],
    stacks: Container[str],
) -> dict[str, CodesReader]:
    """Readers of the parameters that were made of what was just read from these files.

    ``target_of``: the parameter of a tensor on disk, and the pattern of its converter if it has one.
    ``stacks``: parameters that have a matrix for each expert.
    """
    order = {pattern: at for each in converters for at, pattern in enumerate(each.source_patterns)}
    found: dict[str, list[tuple[str, int, Matrix]]] = defaultdict(list)
    readers: dict[str, CodesReader] = {}
    for file in files:
        if not isinstance(file, CodedFiles):
            continue
        for name, matrix in file.matrices.items():
            if matrix.taken:
                target, pattern = target_of(name)
                found[target].append((name, order.get(pattern, 0), matrix))
        for name, stack in file.stacks.items():
            if stack.taken:
                readers[target_of(name)[0]] = CodesReader([[each] for each in stack.taken], is_stack=True)
    for target, made_of in found.items():
        is_stack = target in stacks
        experts: dict[str, list[tuple[int, Matrix]]] = defaultdict(list)
        for name, at, part in sorted(made_of, key=lambda each: dot_natural_key(each[0])):
            experts[name.rpartition(".experts.")[2].partition(".")[0] if is_stack else ""].append((at, part))
        rows = [[part for _, part in sorted(each, key=lambda one: one[0])] for each in experts.values()]
        readers[target] = CodesReader(rows, is_stack)
    return readers


def _parts(matrix: Matrix) -> list[Codes | None]:
    """Parts of a matrix that were read, in that order."""
    return [matrix.read_codes(rows, columns) for rows, columns in matrix.taken]


def _rows_of(codes: Codes | None, rows: Rows) -> Codes | None:
    if codes is None:
        return None
    zeros = None if codes.zeros is None else codes.zeros[..., rows, :]
    return replace(codes, codes=codes.codes[..., rows, :], scales=codes.scales[..., rows, :], zeros=zeros)


def _stacked(codes: Codes | None) -> Codes | None:
    if codes is None:
        return None
    zeros, order = (None if each is None else each[None] for each in (codes.zeros, codes.order))
    return replace(codes, codes=codes.codes[None], scales=codes.scales[None], zeros=zeros, order=order)


def _joined(parts: Sequence[Codes | None], dim: int) -> Codes | None:
    """Codes joined along their outputs; None where kinds differ."""
    known = [each for each in parts if each is not None]
    if len(known) < len(parts) or not known:
        return None
    if len({each.kind for each in known}) > 1:
        return None
    order = known[0].order
    if order is not None and dim == 0:
        order = torch.cat([each.order for each in known if each.order is not None])
    elif not all(each.has_order_of(known[0]) for each in known):
        return None
    zeros = None
    if any(each.zeros is not None for each in known):
        zeros = torch.cat([_or_zero(each) for each in known], dim)
    codes, scales = (torch.cat([getattr(each, name) for each in known], dim) for name in ("codes", "scales"))
    rounding = known[0].rounding if len({each.rounding for each in known}) == 1 else None
    return replace(known[0], codes=codes, scales=scales, zeros=zeros, rounding=rounding, order=order)


def _or_zero(codes: Codes) -> torch.Tensor:
    return torch.zeros_like(codes.scales) if codes.zeros is None else codes.zeros
