"""Chained sums: each host adds its terms to the sum of the hosts before."""

from __future__ import annotations

import torch

from parallel.rounds.arithmetic import add_in_rank_order, sum_type
from parallel.rounds.host_routes import ChainLane
from parallel.rounds.messages import Incoming, Messages
from parallel.rounds.notes import note_of
from parallel.rounds.slots import span_of

CHAIN_BYTES = 256 << 10
"""Bytes of a sum in one message from host to host.

Hosts add up one while others are sent.
"""


def add_along(messages: Messages, lane: ChainLane, terms: torch.Tensor, total: torch.Tensor) -> None:
    """Add terms [members of this host, n] along a lane, to the total [n]."""
    note = note_of("all_reduce", total.nbytes)
    summed = sum_type(total.dtype)
    step = CHAIN_BYTES // summed.itemsize
    sums = torch.empty(total.shape, dtype=summed)
    for low in range(0, len(total), step):
        piece = slice(low, low + step)
        new = list(terms[:, piece].unbind())
        if lane.before is None:
            sums[piece].copy_(new.pop(0))
        else:
            messages.take(note, [Incoming(lane.before, *span_of(sums[piece]))])
        add_in_rank_order(sums[piece], new)
        if lane.after is not None:
            messages.post(note, lane.after, *span_of(sums[piece]))
        else:
            total[piece].copy_(sums[piece])
            for to in lane.ends:
                messages.post(note, to, *span_of(total[piece]))
    if lane.after is not None:
        for low in range(0, len(total), step):
            messages.take(note, [Incoming(lane.last, *span_of(total[low : low + step]))])
    messages.finish()
