"""Codes of a loaded model's weights, for kernels that compute with them.

transformers turns the tensors of a checkpoint into parameters: it renames them, and stacks experts. What it
was given was widened. Here each parameter learns of which parts of which quantised matrices it was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

from engine.model.quantization.matrices import Codes, QuantizedMatrix
from engine.model.quantization.view import CodedFiles

ATTRIBUTE = "lockstep_codes"
"""Attribute of a parameter: how to read its codes."""


class CodesReader:
    """How to read the codes of one parameter: [outputs, inputs], or a stack of experts."""

    def __init__(self, experts: Sequence[Sequence[QuantizedMatrix]], is_stack: bool) -> None:
        """``experts``: for each the matrices of its outputs, in their order.

        One entry if it is no stack.
        """
        self._experts, self._is_stack = experts, is_stack

    def __repr__(self) -> str:
        return f"<CodesReader of {[list(each) for each in self._experts[:1]]} x {len(self._experts)}>"

    def read(self) -> Codes | None:
        """The codes, from the checkpoint; None where they are not all of one kind."""
        stack = [_joined([part for each in expert for part in _parts(each)], -2) for expert in self._experts]
        if not self._is_stack:
            return stack[0]
        return _joined([_stacked(each) for each in stack], 0)


def codes_of(parameter: torch.Tensor) -> Codes | None:
    """The codes of a parameter; None for one that was not quantised."""
    reader: CodesReader | None = getattr(parameter, ATTRIBUTE, None)
    return None if reader is None else reader.read()


def attach_codes(module: Any, files: Sequence[Any], key_mapping: dict[str, str] | None) -> None:
    """Let the parameters of a model know their codes.

    ``files`` are those that it was just read from.
    """
    transforms = get_model_conversion_mapping(module, key_mapping)
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    renamings = [item for item in transforms if not isinstance(item, WeightConverter)]
    order = {pattern: at for each in converters for at, pattern in enumerate(each.source_patterns)}
    parameters = dict(module.named_parameters())
    found: dict[str, list[tuple[str, int, QuantizedMatrix]]] = defaultdict(list)
    for file in files:
        if not isinstance(file, CodedFiles):
            continue
        for name, matrix in file.matrices.items():
            if matrix.taken:
                target, pattern = rename_source_key(
                    name, renamings, converters, module.base_model_prefix, parameters
                )
                found[target].append((name, order.get(pattern, 0), matrix))
    for target, made_of in found.items():
        parameter = parameters.get(target)
        if parameter is None:
            continue
        is_stack = parameter.dim() == 3
        experts: dict[str, list[tuple[int, QuantizedMatrix]]] = defaultdict(list)
        for name, at, matrix in sorted(made_of, key=lambda each: dot_natural_key(each[0])):
            experts[name.rpartition(".experts.")[2].partition(".")[0] if is_stack else ""].append(
                (at, matrix)
            )
        rows = [[matrix for _, matrix in sorted(each, key=lambda one: one[0])] for each in experts.values()]
        setattr(parameter, ATTRIBUTE, CodesReader(rows, is_stack))


def _parts(matrix: QuantizedMatrix) -> list[Codes | None]:
    """What was read of a matrix, in that order."""
    return [matrix.read_codes(rows, columns) for rows, columns in matrix.taken]


def _stacked(codes: Codes | None) -> Codes | None:
    if codes is None:
        return None
    zeros = None if codes.zeros is None else codes.zeros[None]
    return Codes(codes.codes[None], codes.scales[None], zeros, codes.bits)


def _joined(parts: Sequence[Codes | None], dim: int) -> Codes | None:
    """Codes in a row; None where they are not of one kind."""
    known = [each for each in parts if each is not None]
    if len(known) < len(parts) or not known:
        return None
    kinds = {(each.bits, each.scales.shape[-1], each.codes.shape[-1], each.codes.dim()) for each in known}
    if len(kinds) > 1:
        return None
    zeros = None
    if any(each.zeros is not None for each in known):
        zeros = torch.cat([_or_zero(each) for each in known], dim)
    codes, scales = (torch.cat([getattr(each, name) for each in known], dim) for name in ("codes", "scales"))
    return Codes(codes, scales, zeros, known[0].bits)


def _or_zero(codes: Codes) -> torch.Tensor:
    return torch.zeros_like(codes.scales) if codes.zeros is None else codes.zeros
