"""Packed weights on a GPU: layers multiply by the checkpoint's codes, never widened.

A checkpoint is read on the host, where transformers sees widened weights. Each weight that has codes then
gives way to these, which go to the device, and the rest of the model follows: the device never holds the
widened model. Each kind of matrix is compared with torch's operators first. It stays widened where it
differs, or where the kernels do not read its groups.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from engine.gpu.coded_parameter import ATTRIBUTE, coded_of
from engine.gpu.fused_layers import MERGED, MergedLinear, biases_of, plain_layers
from engine.model.expert_weights import expert_modules
from engine.model.quantization.attached import CodesReader, forget_codes, in_a_row, reader_of
from engine.model.quantization.device_codes import device_codes
from engine.model.quantization.layers import parts_of_inputs
from parallel.tensor_parallel import RowParallelLinear

if TYPE_CHECKING:
    from engine.gpu.coded_products import DeviceCodes

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest difference of a product, relative to its size."""
CHECKED_ROWS = 5
EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


@dataclass
class CodedLayers:
    """Result of keeping weights packed: merged products, and counts of matrices."""

    merged: list[MergedLinear] = field(default_factory=list)
    """Products of several layers with one input."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of matrices by outcome: packed, or widened and why."""


def keep_weights_packed(model: Any, device: torch.device, *, experts: bool) -> CodedLayers:
    """Keep the quantised weights of a model packed on a device.

    It was read on the host. ``experts``: theirs as well. The caller brings the rest of the model to the
    device.
    """
    kept = _Kept(device)
    for module in model.modules():
        for names in MERGED:
            layers = plain_layers(module, names)
            if layers is not None and (merged := kept.merge(layers)):
                kept.found.merged.append(merged)
    for path, module in model.named_modules():
        if _is_linear(module) and "forward" not in vars(module):
            kept.keep_linear(module, parts_of_inputs(path, module, module.in_features))
    if experts:
        for module in expert_modules(model).values():
            kept.keep_experts(module)
    if kept.found.counts:
        logger.info("weights: %s", ", ".join(f"{count} {what}" for what, count in kept.found.counts.items()))
    return kept.found


def _is_linear(module: Any) -> bool:
    kind = type(module)
    return kind is torch.nn.Linear or (kind is RowParallelLinear and not module.is_turned)


class _Kept:
    """Packs the quantised weights of a model on one device."""

    def __init__(self, device: torch.device) -> None:
        self.found = CodedLayers()
        self._device = device
        self._agreed: dict[tuple[Any, ...], bool] = {}

    def merge(self, layers: Sequence[torch.nn.Linear]) -> MergedLinear | None:
        """Merge layers with one input into one product, if their codes are alike."""
        readers = [reader_of(layer.weight) for layer in layers]
        known = [reader for reader in readers if reader is not None]
        if len(known) < len(layers) or len({reader.rounds for reader in known}) > 1:
            return None
        weight = in_a_row([layer.weight for layer in layers])
        reader = reader_of(weight)
        assert reader is not None
        codes = self._codes(reader, weight, must_round=known[0].rounds)
        if codes is None:
            return None
        biases = biases_of(layers)
        bias = None if biases is None else biases.to(self._device)
        for layer in layers:
            _empty(layer, "weight")
        setattr(layers[0].weight, ATTRIBUTE, codes)
        self.found.counts["merged products of codes"] += 1
        return MergedLinear(layers, _Product(codes, bias))

    def keep_linear(self, layer: Any, parts: int) -> None:
        """Let a linear layer multiply by its packed weights."""
        reader = reader_of(layer.weight)
        if reader is None:
            return
        codes = self._codes(reader, layer.weight, parts=parts, must_round=reader.rounds)
        if codes is None:
            self.found.counts["products of widened weights"] += 1
            return
        _empty(layer, "weight")
        setattr(layer.weight, ATTRIBUTE, codes)
        layer.forward = _Forward(layer, codes)
        self.found.counts["products of codes"] += 1

    def keep_experts(self, module: Any) -> None:
        """Keep the experts of a layer packed, if all their matrices can be."""
        names = [
            name for name in EXPERT_WEIGHTS if isinstance(getattr(module, name, None), torch.nn.Parameter)
        ]
        readers = {name: reader_of(getattr(module, name)) for name in names}
        if not any(readers.values()):
            return
        found: dict[str, DeviceCodes] = {}
        for name, reader in readers.items():
            weight = getattr(module, name)
            weight = weight.mT if module.is_transposed else weight
            parts = parts_of_inputs(name, module, weight.shape[-1])
            codes = reader and self._codes(reader, weight, parts=parts, must_round=reader.rounds)
            if not codes:
                self.found.counts["layers of widened experts"] += 1
                return
            found[name] = codes
        for name, codes in found.items():
            _empty(module, name)
            setattr(getattr(module, name), ATTRIBUTE, codes)
        self.found.counts["layers of coded experts"] += 1

    def _codes(
        self, reader: CodesReader, weight: torch.Tensor, *, must_round: bool, parts: int = 1
    ) -> DeviceCodes | None:
        """Packed weights on the device; None if their product is not right.

        ``weight``: [..., outputs, inputs], on the host.
        """
        known = reader.read()
        if known is None or known.codes.shape != weight.shape or (known.rounding is not None) != must_round:
            return None
        codes = device_codes(known, self._device, parts)
        if codes is None:
            return None
        groups = codes.scales.shape[1]
        kind = (codes.kind, weight.dim(), codes.inputs // groups, groups == 1, weight.dtype, known.rounding)
        if kind not in self._agreed:
            self._agreed[kind] = _agrees(codes, weight)
        return codes if self._agreed[kind] else None


class _Product:
    """Product with packed weights, and a bias."""

    def __init__(self, codes: DeviceCodes, bias: torch.Tensor | None) -> None:
        self._codes, self._bias = codes, bias

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._codes.product(inputs, self._bias)


class _Forward:
    """``forward`` of a linear layer whose weight is codes."""

    def __init__(self, layer: Any, codes: DeviceCodes) -> None:
        self._layer, self._codes = layer, codes

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        layer, codes = self._layer, self._codes
        if not isinstance(layer, RowParallelLinear):
            return codes.product(inputs, layer.bias)
        dtype = inputs.dtype if codes.rounding is None else torch.float32
        total = layer.sum_over_ranks(codes.product(layer.own_inputs(inputs), dtype=dtype))
        if layer.bias is not None:
            total = total + layer.bias.to(dtype)
        return total.to(inputs.dtype)


def widen_again(modules: Iterable[Any]) -> None:
    """Give experts their widened weights back, since the kernels cannot serve."""
    for module in modules:
        for name in EXPERT_WEIGHTS:
            parameter = getattr(module, name, None)
            if parameter is not None and (codes := coded_of(parameter)) is not None:
                weight = torch.stack(
                    [codes.widened(each, parameter.dtype) for each in range(len(codes.codes))]
                )
                weight = weight.mT.contiguous() if module.is_transposed else weight
                setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))


def held_by(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Number of weights that parameters stand for, and bytes that they take."""
    numbers = held = 0
    for each in parameters:
        codes = coded_of(each)
        numbers += each.numel() if codes is None else codes.numel
        held += each.nbytes if codes is None else codes.nbytes
    return numbers, held


def _empty(module: Any, name: str) -> None:
    """Free a parameter's memory; its type and device stay known."""
    before = getattr(module, name)
    forget_codes(before)
    setattr(module, name, torch.nn.Parameter(before.new_empty(0), requires_grad=False))


def _agrees(codes: DeviceCodes, weight: torch.Tensor) -> bool:
    """Whether the kernels give what torch gives for a few rows, and for many.

    And whether the codes are the weights.
    """
    from engine.gpu.coded_products import WIDENED_ROWS
    from engine.gpu.grouped_products import Pairs

    numbers = torch.Generator().manual_seed(5)
    count = WIDENED_ROWS if weight.dim() == 2 else CHECKED_ROWS
    rows = torch.randn(count, codes.inputs, generator=numbers).to(weight.dtype)
    here = rows.to(codes.codes.device)
    try:
        with torch.inference_mode():
            if weight.dim() == 2:
                some = [here[:CHECKED_ROWS], here]  # many rows are multiplied in another way
                found = torch.cat([codes.product(each) for each in some]).cpu()
                expected = torch.cat([codes.expected(0, each) for each in some]).cpu()
                plain = torch.cat([rows[: len(each)].float() @ weight.float().T for each in some])
            else:
                ids = torch.rand(CHECKED_ROWS, len(weight), generator=numbers).topk(1).indices
                pairs = Pairs.of(ids.to(here.device), len(weight))
                found = codes.product(here, None, pairs, gather=True)[pairs.places.long()].cpu()
                each = zip(ids[:, 0].tolist(), here[:, None], strict=True)
                expected = torch.cat([codes.expected(number, row) for number, row in each]).cpu()
                plain = torch.cat(
                    [
                        row.float() @ weight[number].float().T
                        for number, row in zip(ids[:, 0], rows[:, None], strict=True)
                    ]
                )
    except Exception as error:  # noqa: BLE001 (a compiler of kernels may raise anything)
        lines = str(error).strip().splitlines()
        logger.warning("weights: widened, since a kernel fails: %s", lines[-1][:200] if lines else error)
        return False
    limit = TOLERANCE.get(weight.dtype, 2e-2)
    pairs_of = [(found, expected, limit)]
    if codes.rounding is None:
        pairs_of.append((found, plain, limit))
    differences = [_relative(one, other) / most for one, other, most in pairs_of]
    if not max(differences) <= 1:
        logger.warning(
            "weights: widened, since a kernel differs from torch by %.2g", max(differences) * limit
        )
        return False
    return True


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9))
