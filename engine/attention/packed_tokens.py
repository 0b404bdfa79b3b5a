"""Packed upload of a captured step with prompts, in one array (pure).

Such a step has a fixed number of tokens, of rows of one token, of longer rows, and of tokens whose logits are
wanted. What it does not use of them is filled up. Padding tokens belong to no row: they write to a block that
belongs to no request, and tiles without keys give them zeros. The parts of the array have fixed places but
for the block tables behind them, which are as wide as the step needs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.attention.base import Int64s, PackedRows
from engine.attention.prompt_size import HEADER, LINE, TILE, PromptSize
from engine.attention.splits import with_equal_parts

Int32s = npt.NDArray[np.int32]


def tiles_of_longer_rows(rows: PackedRows, queries: int, size: int | None = None) -> Int64s:
    """Tiles [4, tiles] of a step's longer rows.

    ``size``: tokens of a step that is filled up. Tiles of padding have no keys: as many queries as their
    position lacks to 0.
    """
    pieces = [
        (row, *piece)
        for row in range(rows.num_single, len(rows.starts))
        for piece in with_equal_parts(int(rows.starts[row]), int(rows.counts[row]))
    ]
    row_of_piece, starts, counts = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    per_piece = -(-counts // queries)
    piece = np.repeat(np.arange(len(pieces)), per_piece)
    offset = (np.arange(len(piece)) - np.repeat(np.cumsum(per_piece) - per_piece, per_piece)) * queries
    row, positions = row_of_piece[piece], starts[piece] + offset
    first_tokens = np.cumsum(rows.counts) - rows.counts
    tokens = first_tokens[row] + positions - rows.starts[row]
    tiles = np.stack([row, tokens, np.minimum(counts[piece] - offset, queries), positions])
    if size is None:
        return tiles
    first = np.arange(len(rows.positions), size, queries)
    padding = np.minimum(size - first, queries)
    return np.concatenate([tiles, np.stack([np.zeros_like(first), first, padding, -padding])], axis=1)


def pack_tokens(
    rows: PackedRows,
    size: PromptSize,
    kinds: tuple[int, ...],
    input_ids: Int64s,
    wanted: Int64s,
    sources: Int64s | None = None,
) -> Int32s:
    """Packed array of a step that fits ``size``.

    ``kinds``: queries per tile, by kind of layers. ``sources`` [rows]: see :class:`.DecodeBuffers`; those of
    longer rows do not count.
    """
    num_rows, width = rows.block_tables.shape
    tables_at, num_tokens = size.tables_at(kinds), len(input_ids)
    packed = np.zeros(tables_at + num_rows * width, dtype=np.int32)
    packed[0] = width
    lines = packed[HEADER : size.singles_at].reshape(size.tokens, LINE)
    lines[:] = 0, -1, 0, -1
    lines[:num_tokens, 0] = input_ids
    lines[:num_tokens, 2] = rows.positions
    lines[:num_tokens, 3] = np.repeat(np.arange(num_rows), rows.counts)
    singles = packed[size.singles_at : size.wanted_at].reshape(TILE, size.singles)
    count = rows.num_single
    singles[0, :count] = singles[1, :count] = np.arange(count)
    singles[2, :count] = 1
    singles[3, :count] = rows.starts[:count]
    if sources is not None:
        lines[:count, 1] = sources[:count]
    packed[size.wanted_at : size.wanted_at + len(wanted)] = wanted
    place = size.tiles_at
    for queries in kinds:
        most = size.tiles(queries)
        tiles = tiles_of_longer_rows(rows, queries, size.tokens)
        packed[place : place + TILE * most].reshape(TILE, most)[:, : tiles.shape[1]] = tiles
        place += TILE * most
    packed[tables_at:].reshape(num_rows, width)[:] = rows.block_tables
    return packed
