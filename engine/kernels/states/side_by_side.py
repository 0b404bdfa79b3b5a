"""Attention beside a recurrence: two mixers of one layer that read the same rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.attention.base import LayerShape
from engine.kernels.attention.attention import Attention
from engine.kernels.cache.state_shape import StateShape
from engine.kernels.core.operations import ADD
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.lowering.layer_order import AttentionBeside
from engine.kernels.lowering.parts import KeptNumbers, Mixer, PackedMixer, PositionTable
from engine.kernels.lowering.product import Product, Rows
from engine.kernels.lowering.scratch import Scratch
from engine.kernels.lowering.writer import Writer


@dataclass(frozen=True)
class SideBySide:
    """A recurrence and attention, of which both results are added to the stream."""

    recurrence: Mixer
    attention: Attention
    factors: tuple[float, float]
    """Factors on what the recurrence gives, and on what attention gives."""

    source = None

    @property
    def cached(self) -> LayerShape:
        return self.attention.cached

    @property
    def state(self) -> StateShape | None:
        return self.recurrence.state

    @property
    def num_sums(self) -> int:
        return self.recurrence.num_sums + self.attention.num_sums

    def matrices(self) -> list[torch.Tensor]:
        return [*self.recurrence.matrices(), *self.attention.matrices()]

    def scratch(self) -> list[Scratch]:
        return [*self.recurrence.scratch(), *self.attention.scratch()]

    def tables(self) -> list[PositionTable]:
        return [*self.recurrence.tables(), *self.attention.tables()]

    def with_tables(self, made: Callable[[PositionTable], PositionTable]) -> SideBySide:
        return replace(self, attention=self.attention.with_tables(made))

    def reading(self, source: int) -> SideBySide:
        raise AssertionError("it has a state of its own")

    def chosen_as(self, other: Any) -> SideBySide:
        return replace(self, attention=self.attention.chosen_as(other.attention))

    def cut_inputs(self) -> list[int]:
        return [*self.recurrence.cut_inputs(), *self.attention.cut_inputs()]

    def whole(self) -> SideBySide:
        return replace(self, recurrence=self.recurrence.whole(), attention=self.attention.whole())


def side_by_side(recurrence: Mixer, attention: Mixer, side: AttentionBeside) -> SideBySide:
    """Both mixers of a layer as one.

    A factor on what attention reads is one on its scores, and on what it gives.

    Raises:
        NotRecognised: attention does not pass on such a factor.
    """
    if recurrence.state is None or not isinstance(attention, Attention):
        raise NotRecognised("two mixers of which not one is a recurrence, and the other attention")
    of_recurrence, of_attention = side.factors
    if side.factor_in != 1.0:
        others = attention.qkv_bias, attention.head_norms, attention.wide_norms, attention.value_norm
        if attention.has_gates or any(each is not None for each in (*others, attention.latents)):
            raise NotRecognised("a factor on what attention with biases, norms or gates reads")
        attention = replace(attention, scale=attention.scale * side.factor_in**2)
        of_attention *= side.factor_in
    return SideBySide(recurrence, attention, (of_recurrence, of_attention))


class PackedSideBySide:
    """Two mixers in a step: their operations one after the other."""

    def __init__(self, mixer: SideBySide, recurrence: PackedMixer, attention: PackedMixer) -> None:
        self._factors, self._recurrence, self._attention = mixer.factors, recurrence, attention

    def project(self, writer: Writer, into: Rows, kept: KeptNumbers) -> None:
        """Write the recurrence up to its last product, then queries, keys and values."""
        self._recurrence.project(writer, into, kept)
        self._attention.project(writer, into, kept)

    def mix(self, writer: Writer, kept: KeptNumbers) -> Product:
        """Write the recurrence's last product, and attention up to its own."""
        first = self._recurrence.mix(writer, kept)._replace(factor=self._factors[0])
        writer.multiply(first, writer.stream, ADD)
        return self._attention.mix(writer, kept)._replace(factor=self._factors[1])
