"""Layers whose inputs are rounded to 8 bits, computed by torch.

That is slow, and for want of kernels. Sums of whole numbers are exact, so a layer gives what the native
kernels give, but for the rounding of what stands around it.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch

from engine.model.quantization.attached import ATTRIBUTE, CodesReader, reader_of
from engine.model.quantization.weight_codes import Codes
from parallel.expert_products import PRODUCT
from parallel.parts import parts_here
from parallel.tensor_parallel import RowParallelLinear

INNER = {"o_proj", "out_proj", "dense", "c_proj", "down_proj", "output_linear", "fc2", "dense_4h_to_h"}
"""Names of layers whose inputs tensor-parallel ranks may share.

Each part of these has its own scale (:mod:`parallel.parts`).
"""
_PARTS = "lockstep_parts"


def round_inputs(module: Any) -> bool:
    """Let the layers of a model round their inputs where the checkpoint says so.

    Returns whether there are experts among them, which must be computed one by one.
    """
    has_experts = False
    for path, layer in module.named_modules():
        for name, weight in layer.named_parameters(recurse=False):
            reader = reader_of(weight)
            if reader is None or not reader.rounds:
                continue
            if weight.dim() == 2:
                setattr(layer, _PARTS, parts_of_inputs(path, layer, weight.shape[1]))
                layer.forward = MethodType(_forward, layer)
            else:
                has_experts = True
                _set_product(weight, name)
    return has_experts


def attach_expert_codes(weight: torch.Tensor, name: str, reader: CodesReader) -> None:
    """Let a parameter of experts know its codes, and multiply as they ask for.

    ``name``: of the parameter.
    """
    setattr(weight, ATTRIBUTE, reader)
    if reader.rounds:
        _set_product(weight, name)


def _set_product(weight: torch.Tensor, name: str) -> None:
    setattr(weight, PRODUCT, partial(_expert_product, weight, name in INNER))


def parts_of_inputs(path: str, layer: Any, inputs: int) -> int:
    """Parts of a layer's inputs that have scales of their own, where inputs are rounded.

    ``path`` ends with the layer's name, or with that of a weight of experts.
    """
    return parts_here(inputs, _ranks_of(layer)) if path.rpartition(".")[2] in INNER else 1


def _ranks_of(layer: Any) -> int:
    return layer.num_ranks if isinstance(layer, RowParallelLinear) else 1


def _known(weight: torch.Tensor) -> Codes | None:
    """The codes of a weight, read once and kept.

    None for a made-up one, of a copy of the model.
    """
    reader = reader_of(weight)
    return None if reader is None else reader.keep(weight.device)


def _forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Forward of a linear layer whose inputs are rounded."""
    known = _known(self.weight)
    if known is None or known.rounding is None:
        given: torch.Tensor = type(self).forward(self, inputs)
        return given
    is_partial = isinstance(self, RowParallelLinear)
    result = known.product(self.own_inputs(inputs) if is_partial else inputs, getattr(self, _PARTS))
    if is_partial:
        result = self.sum_over_ranks(result)
    if self.bias is not None:
        result = result + self.bias.float()
    return result.to(inputs.dtype)


def _expert_product(weight: torch.Tensor, is_inner: bool, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """Outputs of an expert for rows that are rounded."""
    known = _known(weight)
    if known is None or known.rounding is None:
        return rows @ weight[expert].T
    parts = parts_here(weight.shape[-1], 1) if is_inner else 1
    return known.of(expert).product(rows, parts).to(rows.dtype)
