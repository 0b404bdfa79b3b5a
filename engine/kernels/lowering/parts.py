"""Contract of layer parts: what each kind provides so that a step computes it.

A layer has a *mixer*, which looks at other tokens (attention), and a *feed-forward* part (an MLP, a mixture
of experts). A recogniser finds a part in a model's modules. Packing lays its weights out. The packed part
writes its operations. :mod:`engine.kernels.registry` lists the kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from engine.attention.base import LayerShape
from engine.kernels.adapters.sites import PackedSite, Site, Sites
from engine.kernels.cache.state_shape import StateShape
from engine.kernels.lowering.product import Product, Rows
from engine.kernels.lowering.scratch import UsesScratch
from engine.kernels.lowering.writer import Writer
from engine.kernels.norms.norm import Norm
from engine.kernels.products.packing import Packer


class PositionTable(Protocol):
    """A table by position. Equal ones are made once."""

    def table(self, positions: torch.Tensor) -> torch.Tensor:
        """Rows [positions, ...] of the table."""


class LayerPart(UsesScratch, Protocol):
    """A part of a layer as a recogniser found it."""

    @property
    def num_sums(self) -> int:
        """Sums over the tensor-parallel ranks that one step makes for it."""

    def matrices(self) -> list[torch.Tensor]:
        """Weights that packing lays out, and that the model can let go then."""

    def cut_inputs(self) -> list[int]:
        """Numbers of inputs here of each product that the ranks have parts of."""

    def whole(self) -> Any:
        """The same part with whole sums, as if there were one rank."""


class Mixer(LayerPart, Protocol):
    """A part that reads what earlier tokens left: attention, a recurrence, or both."""

    @property
    def cached(self) -> LayerShape | None:
        """Shape of what is cached of a token; None without keys and values."""

    @property
    def state(self) -> StateShape | None:
        """Shape of its recurrent state; None without one."""

    @property
    def source(self) -> int | None:
        """Number of another layer's cache that it reads; None for its own."""

    def tables(self) -> list[PositionTable]:
        """Tables by position that its operations read."""

    def with_tables(self, made: Callable[[PositionTable], PositionTable]) -> Any:
        """The same mixer, each of its tables replaced by a function's result."""

    def reading(self, source: int) -> Any:
        """The same mixer, reading the cache of another layer."""

    def chosen_as(self, other: Any) -> Any:
        """The same mixer, with another one's choices that depend on sizes."""


class PartialResult:
    """Base of mixers whose one result may be a sum over the tensor-parallel ranks."""

    is_partial: bool
    """Whether it is, without its bias."""

    @property
    def num_sums(self) -> int:
        """See :class:`LayerPart`."""
        return int(self.is_partial)


class FeedForward(LayerPart, Protocol):
    """A part that computes each token by itself: an MLP or a mixture."""

    @property
    def sums_per_token(self) -> int:
        """Rows of one token in the largest sum over ranks."""


class Packing(NamedTuple):
    """Facts for laying out weights: packer, type, ranks, spread experts."""

    packer: Packer
    dtype: torch.dtype
    """Type of the rows."""
    ranks: int
    """Tensor-parallel ranks."""
    spread: Any
    """Packs experts that come and go when they are used; None: experts stay."""
    sites: Sites | None = None
    """Products beside which adapters add something; None: none does."""

    def site(self, site: Site | None) -> PackedSite | None:
        """Room for the adapters of a product; None without any."""
        return None if self.sites is None or site is None else self.sites.packed(site)


class PartPlace(NamedTuple):
    """Norms and factors around a part in its layer."""

    norm: Norm | None
    """Norm of what the part reads."""
    last_norm: Norm | None
    """Norm of what it gives."""
    factor: float
    """Factor on what it adds."""


class KeptNumbers(NamedTuple):
    """Numbers of what a mixer keeps, among the same of all layers here."""

    cache: int
    """Number of its keys and values, if it has any."""
    state: int
    """Number of its recurrent state, if it has one."""


class PackedMixer(Protocol):
    """A mixer whose weights are laid out."""

    def project(self, writer: Writer, into: Rows, kept: KeptNumbers) -> None:
        """Write operations for all tokens, whether their logits are wanted or not.

        A recurrence is among them: each token changes the state.
        """

    def mix(self, writer: Writer, kept: KeptNumbers) -> Product:
        """Write the other operations, up to the last product.

        They are those of the tokens that the stream has (``writer.rows``).
        """


class PackedFeedForward(Protocol):
    """A feed-forward part whose weights are laid out."""

    @property
    def exchanges(self) -> bool:
        """Whether members of a group compute rows for each other."""

    def read(self, writer: Writer, place: PartPlace) -> Rows:
        """Write the norm before it; returns the rows that it reads."""

    def add(self, writer: Writer, place: PartPlace, rows: Rows) -> None:
        """Write all that it adds to the stream."""
