"""Fixed parts of a matrix product's inputs, for equal sums at any TP (pure).

Each is added up by itself. The parts are the same for any number of tensor-parallel ranks, each of which may
have some. Neighbours are added first: (0 + 1) + (2 + 3). So the bits of the sum do not depend on the number
of ranks.
"""

from __future__ import annotations

MOST_PARTS = 4
"""Maximum number of input parts of a product, and so of ranks that share them."""
_TILE_INPUTS = 32
"""Inputs that a tile of AMX takes.

Vectors would compute a product whose parts cut one.
"""


def parts_of(inputs: int) -> int:
    """Number of fixed parts into which a product's inputs are cut, over all ranks.

    It depends on the model alone: the most that leave tiles whole, or words where there are no tiles.
    """
    unit = 2 if inputs % _TILE_INPUTS else _TILE_INPUTS
    return next((parts for parts in (MOST_PARTS, 2) if inputs % (parts * unit) == 0), 1)


def is_order_fixed(inputs: int, ranks: int) -> bool:
    """Whether each of so many ranks gets the same number of whole parts."""
    return parts_of(inputs) % ranks == 0


def parts_here(inputs: int, ranks: int) -> int:
    """Number of fixed parts in the ``inputs`` of one of so many ranks."""
    whole = inputs * ranks
    return parts_of(whole) // ranks if is_order_fixed(whole, ranks) else 1
