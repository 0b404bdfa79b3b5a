"""The output layer: the last norm, logits, and the choice of a token.

The factor and the cap are seen by running the model's own code on made-up numbers, with stand-ins for what
is in between.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast

from engine.kernels.adapters.sites import Site
from engine.kernels.core.operations import AS_FLOAT, SELECTED, TO_CHOOSE, OperationKind
from engine.kernels.core.stand_ins import Gives, NotRecognised, distance, made_up, with_parts
from engine.kernels.lowering.parts import Packing
from engine.kernels.lowering.writer import Writer, factor_field
from engine.kernels.norms.norm import Norm, norm_of
from engine.model.sharding.shard import PassThrough

CLOSE = 1e-5
TOKENS = 3
SMALL, HUGE = 1e-3, 1e30
BEST_BYTES = 16
"""Bytes of what a rank finds for a row (``Best`` in ``choosing.hpp``)."""


@dataclass(frozen=True)
class Output:
    """The last norm, and the output layer."""

    norm: Norm
    head: torch.Tensor
    """[tokens here, hidden]"""
    bias: torch.Tensor | None
    """[tokens here] float32"""
    vocab: int
    """Tokens here."""
    first: int
    """Number of the first of them."""
    is_partial: bool
    """Whether other ranks have other tokens."""
    factor: float
    """Factor on the logits."""
    cap: float
    """Cap of the logits: they become cap * tanh(logits / cap); 0 for none."""
    module: Any = None
    """The output layer itself."""


def output_of(module: Any, norm: Any, hidden: int) -> Output | None:
    """The output layer of a model behind its last norm; None before the last stage."""
    head = module.lm_head
    if isinstance(head, PassThrough):
        return None
    first = getattr(head, "first", None)
    bias = None if head.bias is None else head.bias.detach().to(torch.float32, copy=True)
    outputs, is_partial = head.weight.shape[0], first is not None
    factor, cap = _factor_and_cap(module, hidden)
    return Output(
        norm_of(norm, hidden), head.weight, bias, outputs, first or 0, is_partial, factor, cap, head
    )


class _Outputs(MoeModelOutputWithPast):  # type: ignore[misc]
    """Stand-in for a base model's outputs: hidden states, and nothing else."""

    def __getattr__(self, _name: str) -> None:
        return None


def _factor_and_cap(module: Any, hidden: int) -> tuple[float, float]:
    """Factor on the logits, and their cap.

    A cap c makes c * tanh(logits / c) of them; 0 stands for none.
    """
    rows = made_up(1, TOKENS, hidden, seed=1)
    tried = torch.tensor([SMALL, 1.0, -2.0, 50.0, HUGE], dtype=torch.float64)
    head = Gives(tried.expand(1, TOKENS, -1))
    head.weight = torch.nn.Parameter(rows.new_empty(0))  # some models read its type
    base = Gives(_Outputs(last_hidden_state=rows))
    for name, value in vars(getattr(module, module.base_model_prefix)).items():
        if isinstance(value, int | float):  # some models keep their factor there
            base.__dict__.setdefault(name, value)
    ids = torch.arange(TOKENS)[None]
    found = (
        with_parts(module, {module.base_model_prefix: base, "lm_head": head})(
            input_ids=ids, position_ids=ids, use_cache=False
        )
        .logits[0, 0]
        .double()
    )
    before = float((head.given[0] * rows).sum() / rows.square().sum())
    cap = float(found[-1]) if float(found[-1]) < HUGE**0.5 else 0.0
    slope = float(found[1]) if not cap else float(torch.atanh(found[0] / cap)) * cap / SMALL
    expected = slope * tried
    if cap:
        expected = cap * torch.tanh(expected / cap)
    if distance(found[:-1], expected[:-1]) > CLOSE:
        raise NotRecognised("it changes what the output layer gives")
    return before * slope, cap


class PackedOutput:
    """The weights of an output layer, and its operations."""

    def __init__(self, output: Output, packing: Packing) -> None:
        self.output = output
        self.head = packing.packer.panels(output.head, multiple=32)
        site = Site((output.module,), (output.vocab,), output.head.shape[1])
        self.site = None if output.module is None else packing.site(site)
        """Adapters of it, of the tokens here."""

    def behind(self, norm: Norm) -> PackedOutput:
        """The same output layer behind another norm, without adapters."""
        made = copy.copy(self)
        made.output, made.site = replace(self.output, norm=norm), None
        return made

    def write(self, writer: Writer) -> None:
        """Write operations for the selected rows' logits and their most likely tokens."""
        buffers, output = writer.buffers, self.output
        if not writer.rows:
            writer.select()
        writer.norm(output.norm, buffers.last)
        added = writer.adapted(self.site, buffers.last)
        writer.add(
            OperationKind.LINEAR,
            added=added,
            into=writer.rounded(buffers.last, self.head, writer.hidden),
            out=buffers.logits,
            weights=self.head,
            more=output.bias,
            n=output.vocab,
            k=writer.hidden,
            number=factor_field(output.factor),
            flags=SELECTED | AS_FLOAT,
        )
        if output.cap:
            writer.add(OperationKind.CAP, out=buffers.logits, n=output.vocab, number=output.cap)
        if not output.is_partial:
            writer.add(OperationKind.CHOOSE, into=buffers.logits, out=buffers.chosen, n=output.vocab)
        elif (sums := writer.common_sums) is not None:
            area = sums.area_to_choose()
            writer.add(
                OperationKind.CHOOSE,
                into=buffers.logits,
                out=area.address,
                n=output.vocab,
                a=output.first,
                flags=AS_FLOAT,
            )
            writer.meet(area.begin, BEST_BYTES, TO_CHOOSE)
            writer.add(OperationKind.BEST_OF_ALL, out=buffers.chosen, extra=sums.record, a=area.begin)
