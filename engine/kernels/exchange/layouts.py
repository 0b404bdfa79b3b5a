"""Struct layouts that an exchange shares with ``linked.hpp``."""

from __future__ import annotations

import numpy as np

EXCHANGE = np.dtype(
    [(name, np.int64) for name in (
        "rank", "size", "num_experts", "num_local", "top_k", "hidden", "rows_at", "ids_at", "places_at",
        "results_at", "arenas", "returned", "copies", "counts", "most_copies", "numbers", "line",
        "sizes", "firsts", "rounds", "counted", "begins", "sources", "gathered", "check", "crowded",
        "linkage", "row_bytes"
    )]
)  # fmt: skip
"""Layout of an exchange in ``linked.hpp``."""
_LEARNED = "budget", "arrival", "products", "offered_at", "began_at", "first_pass", "next_look"
LINKAGE = np.dtype(
    [(name, np.float64 if name in _LEARNED else np.int64) for name in (
        "links", "are_sums", "peers", "hosts", "roles", "most", "area", "area_bytes", "look", *_LEARNED,
        "num_missing", "now", "problem", "problem_rank", "problem_note", "problem_bytes"
    )]
)  # fmt: skip
PEER = np.dtype(
    [(name, np.int64) for name in (
        "stage", "note", "num_bytes", "expected", "pass", "is_returned", "offer_note", "offer_bytes",
        "results_note", "results_bytes"
    )]
)  # fmt: skip
