"""Notes: one number for a call and its bytes, the same at all members.

A note stands beside each slot of shared memory and in the header of each message over a link. So a member
notices when another one makes a different call. This module loads no torch.
"""

from __future__ import annotations

CALLS = (
    "all_gather_ints", "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast",
    "all_gather_view", "all_to_all_views", "send",
)  # fmt: skip
"""Names of calls in the order of their numbers, which C++ has, too."""


def note_of(call: str, num_bytes: int) -> int:
    """Note of a call with so many bytes."""
    return CALLS.index(call) + num_bytes * len(CALLS)


def call_of(note: int) -> str:
    """Name and bytes of a note's call in words, whatever number it is."""
    num_bytes, call = divmod(note, len(CALLS))
    return f"{CALLS[call]} of {num_bytes} bytes"
