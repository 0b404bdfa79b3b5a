"""Transfer of experts between hosts, over the links of a new group.

No step uses that group yet, so its calls are free for this. All members make the same ones: first all tell
what they hold and want, then bytes go in rounds of bounded size until the last one is there. See
:mod:`parallel.expert_moves`.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from engine.model.checkpoint import ReadingStopped
from engine.model.expert_change import Expert, HeldExperts, pairs_of
from parallel.communicators.base import Communicator
from parallel.expert_moves import Gift, gifts, row_of

logger = logging.getLogger(__name__)

ROUND_BYTES = 1 << 20
"""Bytes from one member to another in a round."""
CHECK_BYTES = 8
"""Bytes behind each expert: a CRC of it and of the name of its weights."""


def exchange(
    group: Communicator, held: HeldExperts, hosts: Sequence[str], should_stop: Callable[[], bool]
) -> int:
    """Exchange the experts of a new group; returns how many came here.

    ``hosts``: of each member. What does not come is read from the checkpoint.

    Raises:
        CheckpointError: that fails.
        CollectiveError: a member is gone.
        ReadingStopped: ``should_stop`` returned True.
    """
    if should_stop():
        raise ReadingStopped
    each, layers, weights = held.num_experts, len(held.experts), held.weights
    row = row_of(_numbers(pairs_of(held.experts), each), _numbers(held.wanted, each), layers * each)
    mine = group.rank
    planned, began = gifts(group.all_gather_ints(row), hosts), time.monotonic()
    sizes = {gift: held.bytes_of(gift.expert // each) + CHECK_BYTES for gift in planned}
    parcels = {gift: _Parcel(sizes[gift]) for gift in planned if gift.to == mine}
    outgoing = {to: _Stream(_sent(held, planned, mine, to)) for to in range(group.size)}
    incoming = {
        source: [parcels[gift] for gift in planned if (gift.source, gift.to) == (source, mine)]
        for source in range(group.size)
    }
    for send, receive in _rounds(planned, sizes, mine, group.size):
        if should_stop():
            raise ReadingStopped
        parts = [outgoing[to].take(count) for to, count in enumerate(send)]
        came = group.all_to_all(torch.cat(parts), send, receive)
        for source, part in enumerate(came.split(list(receive))):
            _fill(incoming[source], part)
    seconds, num_bytes = time.monotonic() - began, sum(len(parcel.data) for parcel in parcels.values())
    checked = {gift: parcel.data for gift, parcel in parcels.items() if parcel.is_right(weights)}
    right = {divmod(gift.expert, each): data for gift, data in checked.items()}
    if len(right) < len(parcels):
        logger.warning("%d experts came with wrong bytes or of other weights: they are read instead",
                       len(parcels) - len(right))  # fmt: skip
    if right:
        rate = num_bytes / max(seconds, 1e-6)
        if num_bytes >= ROUND_BYTES:  # fewer show the delay of a link, not its rate
            held.link_rate = rate
        logger.info("%d experts came from other instances in %.2f s (%.0f MB/s)",
                    len(right), seconds, rate / 1e6)  # fmt: skip
    held.complete(right, should_stop)
    return len(right)


def _numbers(experts: Collection[Expert], each: int) -> set[int]:
    """Experts as :mod:`parallel.expert_moves` counts them, with so many in each layer."""
    return {layer * each + expert for layer, expert in experts}


def _rounds(
    planned: Sequence[Gift], sizes: dict[Gift, int], mine: int, size: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Bytes that go to each member, and that come from each, in each round."""
    totals = [[0] * size for _ in range(size)]
    for gift in planned:
        totals[gift.source][gift.to] += sizes[gift]
    for begin in range(0, max(map(max, totals)), ROUND_BYTES):
        now = [[min(max(0, total - begin), ROUND_BYTES) for total in row] for row in totals]
        yield now[mine], [row[mine] for row in now]


def _sent(held: HeldExperts, planned: Sequence[Gift], mine: int, to: int) -> Iterator[torch.Tensor]:
    """Bytes of the experts that go to a member, each with its check."""
    for gift in planned:
        if (gift.source, gift.to) == (mine, to):
            data, weights = held.data_of(divmod(gift.expert, held.num_experts))
            yield data
            yield torch.tensor([_check(data, weights)], dtype=torch.int64).view(torch.uint8)


class _Stream:
    """Stream of bytes from several buffers, in pieces of any size."""

    def __init__(self, parts: Iterator[torch.Tensor]) -> None:
        self._parts = parts
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int) -> torch.Tensor:
        """Take the next bytes, as many as asked for."""
        found = []
        while count:
            if not len(self._rest):
                self._rest = next(self._parts)
            found.append(self._rest[:count])
            count -= len(found[-1])
            self._rest = self._rest[len(found[-1]) :]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8)


class _Parcel:
    """Receiver of one expert's bytes, which arrive in pieces."""

    def __init__(self, size: int) -> None:
        """``size``: with its check."""
        self._bytes = torch.empty(size, dtype=torch.uint8)
        self._count = 0

    @property
    def data(self) -> torch.Tensor:
        return self._bytes[:-CHECK_BYTES]

    @property
    def room(self) -> int:
        return len(self._bytes) - self._count

    def is_right(self, weights: str) -> bool:
        return int(self._bytes[-CHECK_BYTES:].clone().view(torch.int64)) == _check(self.data, weights)

    def put(self, part: torch.Tensor) -> None:
        self._bytes[self._count : self._count + len(part)] = part
        self._count += len(part)


def _fill(parcels: list[_Parcel], part: torch.Tensor) -> None:
    """Put bytes into the first parcels that have room."""
    while len(part):
        while not parcels[0].room:
            parcels.pop(0)
        count = min(len(part), parcels[0].room)
        parcels[0].put(part[:count])
        part = part[count:]


def _check(data: torch.Tensor, weights: str) -> int:
    """CRC of an expert's bytes and of its weights' digest: members may have different ones."""
    return zlib.crc32(data.numpy(), zlib.crc32(weights.encode()))
