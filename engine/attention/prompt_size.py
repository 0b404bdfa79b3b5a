"""Fixed sizes of captured steps with prompts, and the layout of their upload (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

HEADER = 4
"""Numbers before the tokens; the first is the width of the block tables."""
LINE = 4
"""Numbers of a token: its id, its source as in :mod:`engine.attention.packed_rows`, position, row."""
TILE = 4
"""Arrays of tiles: row, first packed token, queries, position of the first."""
MOST_KINDS = 4
"""Most different numbers of queries per tile among the layers of a model."""
LOGITS_BESIDE = 64
"""Tokens whose logits may be wanted beside those of rows of one token."""


@dataclass(frozen=True, order=True)
class PromptSize:
    """Fixed size of a captured step with prompts."""

    tokens: int
    singles: int
    """Most rows of one token."""
    prompts: int
    """Most longer rows."""

    @property
    def rows(self) -> int:
        """Most rows."""
        return self.singles + self.prompts

    @property
    def wanted(self) -> int:
        """Most tokens whose logits are wanted."""
        return min(self.tokens, self.singles + LOGITS_BESIDE)

    def fits(self, tokens: int, singles: int, prompts: int, wanted: int) -> bool:
        """Whether a step with so many of each can be filled up to this size."""
        return (
            tokens <= self.tokens
            and singles <= self.singles
            and prompts <= self.prompts
            and wanted <= self.wanted
        )

    def tiles(self, queries: int) -> int:
        """Most tiles of longer rows and of padding, by queries per tile.

        The context's parts may change their size within a row, which cuts it in two.
        """
        return self.tokens // queries + 2 * self.prompts + 1

    @cached_property
    def singles_at(self) -> int:
        """Place of the tiles of rows of one token."""
        return HEADER + LINE * self.tokens

    @cached_property
    def wanted_at(self) -> int:
        """Place of the wanted tokens."""
        return self.singles_at + TILE * self.singles

    @cached_property
    def tiles_at(self) -> int:
        """Place of the tiles of the first kind."""
        return self.wanted_at + self.wanted

    def tables_at(self, kinds: tuple[int, ...]) -> int:
        """Place of the block tables, a multiple of 16 bytes.

        ``kinds``: queries per tile, by kind of layers.
        """
        end = self.tiles_at + TILE * sum(map(self.tiles, kinds))
        return -(-end // HEADER) * HEADER
