"""Codes of a checkpoint in the form in which kernels of a GPU read them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.model.quantization.stacks import TWICE
from engine.model.quantization.weight_codes import Codes

if TYPE_CHECKING:
    from engine.gpu.coded_products import DeviceCodes


def device_codes(known: Codes, device: torch.device, parts: int = 1) -> DeviceCodes | None:
    """Codes of a matrix or a stack of them, on a device.

    None where the kernels do not read their groups. ``parts``: of the inputs, if they are rounded.
    """
    from engine.gpu.coded_products import GROUP_STEP, DeviceCodes

    is_matrix = known.codes.dim() == 2
    order = None
    if known.order is not None:
        order = _order_of(known.order) if is_matrix else None
        if order is None:
            return None
        groups = len(known.scales[0])
        if not bool((known.order.long()[order].view(groups, -1) == torch.arange(groups)[:, None]).all()):
            return None
        known = replace(known, codes=known.codes[:, order], order=None)
    if is_matrix:
        zeros = None if known.zeros is None else known.zeros[None]
        known = replace(known, codes=known.codes[None], scales=known.scales[None], zeros=zeros)
    inputs, groups = known.codes.shape[-1], known.scales.shape[-1]
    group = inputs // groups
    if groups > 1 and group % GROUP_STEP:
        return None
    sums = None
    if known.rounding is not None:
        if groups > 1 or known.bits != 8 or known.is_float or known.zeros is not None:
            return None
        if not known.rounding.is_centred:
            sums = known.codes.unflatten(-1, (parts, -1)).sum(-1, dtype=torch.int32).mT.contiguous()
            sums = there(sums, device)
    kind, factor = _kind_of(known)
    zeros = None if known.zeros is None else there(known.zeros.mT.contiguous(), device)
    return DeviceCodes(
        there(_packed(known), device),
        there((known.scales.mT * factor).contiguous(), device),
        zeros,
        kind,
        inputs,
        None if order is None else there(order, device),
        known.rounding,
        parts,
        sums,
    )


def there(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy of a host tensor on a device."""
    return tensor.to(device)


def _kind_of(known: Codes) -> tuple[int, float]:
    """The kernels' kind of these codes, and what their scales are multiplied by."""
    from engine.gpu.coded_kernels import FLOAT4, FLOAT8, INT4, INT8
    from engine.gpu.coded_products import FLOAT8_FACTOR

    if known.bits == 8:
        return (FLOAT8, FLOAT8_FACTOR) if known.is_float else (INT8, 1.0)
    return (FLOAT4 if known.is_float else INT4), 1.0


def _packed(known: Codes) -> torch.Tensor:
    """Codes packed as uint8 [matrices, outputs, bytes]."""
    if known.bits == 8:
        return known.codes.contiguous().view(torch.uint8)
    numbers = known.codes
    if known.is_float:
        places = {number: place for place, number in reversed(list(enumerate(TWICE.tolist())))}
        by_number = torch.tensor([places.get(number, 0) for number in range(-128, 128)], dtype=torch.uint8)
        numbers = by_number[numbers.int() + 128]
    else:
        numbers = numbers.view(torch.uint8) & 15
    from engine.gpu.coded_products import WORD

    if missing := -numbers.shape[-1] % WORD:
        numbers = torch.nn.functional.pad(numbers, (0, missing))
    low, high = numbers.unflatten(-1, (-1, 2, WORD // 2)).unbind(-2)
    return (low | high << 4).flatten(-2).contiguous()


def _order_of(groups: torch.Tensor) -> torch.Tensor:
    """Inputs sorted by their group."""
    return torch.argsort(groups, stable=True)
