"""Sizes of a layer of state space duality (Mamba 2)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kernels.cache.state_shape import StateShape

LANES = 16
"""Numbers of a vector: an open row keeps x in whole ones (``ssd.hpp``)."""


@dataclass(frozen=True)
class Sizes:
    """Heads of a layer, and their numbers."""

    heads: int
    groups: int
    """Groups of heads that share B and C."""
    width: int
    """Numbers of a head."""
    size: int
    """Numbers of its state for each of those."""

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.width

    @property
    def convolved(self) -> int:
        """Numbers of a token that the convolution reads."""
        return self.inner + 2 * self.groups * self.size

    @property
    def projected(self) -> int:
        """Numbers of a token behind the first product."""
        return self.inner + self.convolved + self.heads

    def state(self, kernel: int) -> StateShape:
        """Shape of what such a layer keeps; ``kernel``: tokens that its convolution reads."""
        shared = -(-self.groups * self.size // self.heads)
        return StateShape(
            kernel=kernel,
            width=self.convolved,
            heads=self.heads,
            key_dim=self.size,
            value_dim=self.width,
            head_floats=-(-self.width // LANES) * LANES + 1 + shared,  # x, the step size, a share of all B
        )
