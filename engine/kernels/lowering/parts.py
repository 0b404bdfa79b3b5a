"""What a kind of layer part provides, so that a step can compute it.

A layer has a *mixer*, which looks at other tokens (attention), and a *feed-forward* part (an MLP, a mixture
of experts). A recogniser finds a part in a model's modules. Packing lays its weights out. The packed part
writes its operations. :mod:`engine.kernels.registry` lists the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import torch

from engine.attention.base import LayerShape
from engine.kernels.norms.norm import Norm
from engine.kernels.products.packing import PackedWeights, Packer

if TYPE_CHECKING:
    from engine.kernels.lowering.writer import Writer

Rows: TypeAlias = "torch.Tensor | int"
"""Rows between operations: a tensor, or the address of rows that lie inside of wider ones."""


@dataclass(frozen=True)
class Scratch:
    """Rows that operations of one part hand on to each other; parts share those of one name."""

    name: str
    width: int
    """Numbers of a row. The widest part of a model decides."""
    per: Literal["token", "group token"] = "token"
    """One row for each token of this member, or of all members of its group."""
    times: int = 1
    """Rows for each token."""
    slack: int = 0
    """Further rows, which may be read but are not used."""
    dtype: torch.dtype | None = None
    """None: rows of the model's type, laid out as :mod:`engine.kernels.core.rows` describes."""
    is_input: bool = True
    """Whether products may read them, so that they may have to be rounded to 8 bits."""


class PositionTable(Protocol):
    """A table by position. Equal ones are made once."""

    def table(self, positions: torch.Tensor) -> torch.Tensor:
        """Rows [positions, ...] of the table."""


class UsesScratch(Protocol):
    """What hands rows on between its operations."""

    def scratch(self) -> list[Scratch]:
        """Rows that its operations hand on."""


class Part(UsesScratch, Protocol):
    """A part of a layer as a recogniser found it."""

    @property
    def num_sums(self) -> int:
        """Sums over the tensor-parallel ranks that one step makes for it."""

    def matrices(self) -> list[torch.Tensor]:
        """Weights that packing lays out, and that the model can let go then."""

    def cut_inputs(self) -> list[int]:
        """Numbers of inputs here of each product that the ranks have parts of."""

    def whole(self) -> Any:
        """The same part as if no other rank had some of it."""


class Mixer(Part, Protocol):
    """A part that reads what earlier tokens left: attention."""

    @property
    def cached(self) -> LayerShape:
        """What is cached of a token."""

    @property
    def source(self) -> int | None:
        """Number of the layer whose cache it reads; None for its own."""

    def tables(self) -> list[PositionTable]:
        """Tables by position that its operations read."""

    def with_tables(self, made: Callable[[PositionTable], PositionTable]) -> Any:
        """The same with what is made of each of its tables."""

    def reading(self, source: int) -> Any:
        """The same with the cache of another layer, which it reads."""

    def chosen_as(self, other: Any) -> Any:
        """The same with all that a recogniser chooses by sizes as it was chosen for another one."""


class FeedForward(Part, Protocol):
    """A part that computes each token by itself: an MLP or a mixture."""

    @property
    def sums_per_token(self) -> int:
        """Rows of one token in the largest sum over ranks."""


class Packing(NamedTuple):
    """Where and for whom weights are laid out."""

    packer: Packer
    dtype: torch.dtype
    """Type of the rows."""
    ranks: int
    """Tensor-parallel ranks."""
    spread: Any
    """What packs experts that come and go when they are used; None: experts stay, and are packed now."""


class Product(NamedTuple):
    """Last product of a part, whose result is added to the stream."""

    into: torch.Tensor
    weights: PackedWeights | None
    width: int
    """Inputs here."""
    bias: torch.Tensor | None
    is_partial: bool
    """Whether other ranks have other inputs."""
    row_factors: torch.Tensor | None = None
    """Logits [rows] in float32, whose sigmoids are factors on the result."""


class Place(NamedTuple):
    """Norms and factors around a part in its layer."""

    norm: Norm | None
    """Norm of what the part reads."""
    last_norm: Norm | None
    """Norm of what it gives."""
    factor: float
    """Factor on what it adds."""


class PackedMixer(Protocol):
    """A mixer whose weights are laid out."""

    def project(self, writer: Writer, into: Rows) -> None:
        """Write what all tokens need, whether or not their logits are wanted."""

    def mix(self, writer: Writer, number: int) -> Product:
        """Write the rest up to the last product. ``number``: of the layer."""


class PackedFeedForward(Protocol):
    """A feed-forward part whose weights are laid out."""

    @property
    def exchanges(self) -> bool:
        """Whether members of a group compute rows for each other."""

    def read(self, writer: Writer, place: Place) -> Rows:
        """Write the norm before it; returns the rows that it reads."""

    def add(self, writer: Writer, place: Place, rows: Rows) -> None:
        """Write all that it adds to the stream."""


def all_scratch(parts: Sequence[UsesScratch]) -> dict[str, Scratch]:
    """Rows of all parts by name, each of the widest and most."""
    found: dict[str, Scratch] = {}
    for each in (scratch for part in parts for scratch in part.scratch()):
        known = found.get(each.name)
        if known is None or (each.width, each.times) > (known.width, known.times):
            found[each.name] = each
    return found
