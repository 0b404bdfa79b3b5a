"""Index of the prompt blocks that each instance holds, or is about to hold (pure).

Block hashes come from :func:`engine.pieces.pool.prefix_names`. One table serves all instances, with a
bit for each: looking a prompt up costs one look per block, however many instances there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import or_

from engine.messages import BlockEvents
from engine.pieces.block_log import split_names
from router.dispatch.evictions import Evictions

DIGITS = bytes.maketrans(b"01", b"\0\1")
MAX_BLOCKS = 2_000_000
"""Different blocks that are remembered; more are ignored."""


class _Holder:
    """State of one instance in the index, apart from its block hashes."""

    __slots__ = ("bit", "expectations", "expected", "has_gap", "next", "num_blocks")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.next: int | None = None
        """Number of the next change; None: the next events must be of all blocks."""
        self.has_gap = False
        self.num_blocks = 0
        self.expected: Counter[int] = Counter()
        self.expectations: dict[int, Sequence[int]] = {}
        """By dispatch number."""


class PrefixIndex:
    """Block hashes of all instances, which it knows by name."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._stored: dict[int, int] = {}
        """Block -> the bits of its holders."""
        self._expected: dict[int, int] = {}
        self._holders: dict[str, _Holder] = {}
        self.names: list[str] = []
        """Instances by the number of their bit; another list with each change of them."""
        self.touched: set[str] = set()
        """Instances whose numbers of blocks may have changed."""
        self.evictions = Evictions()

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._stored)} blocks of {len(self._holders)} instances>"

    def __len__(self) -> int:
        return len(self._stored)

    def num_blocks(self, name: str) -> int:
        """Blocks that an instance is known to hold."""
        return self._holders[name].num_blocks if name in self._holders else 0

    def num_expected(self, name: str) -> int:
        """Blocks that an instance is about to hold."""
        return len(self._holders[name].expected) if name in self._holders else 0

    def blocks_kept(self, name: str, used: int) -> int:
        """Blocks of an instance that are ``used`` or cached, or will be."""
        holder = self._holders.get(name)
        return used if holder is None else max(used, holder.num_blocks) + len(holder.expected)

    @property
    def expects_any(self) -> bool:
        """Whether any instance is about to hold blocks."""
        return bool(self._expected)

    # ---- what instances say

    def apply(self, name: str, events: BlockEvents) -> bool:
        """Apply an instance's block events.

        Returns False if earlier events were missed: then the instance must send all of its blocks.
        """
        holder = self._holder(name)
        self.touched.add(name)
        if events.reset:
            self._clear(holder)
            holder.has_gap = False
        elif events.first != holder.next:
            is_new, holder.has_gap, holder.next = not holder.has_gap, True, None
            self._clear(holder)
            return not is_new
        for block in split_names(events.stored):
            self._store(holder, int.from_bytes(block, "big"), is_news=not events.reset)
        for block in split_names(events.dropped):
            self._drop(holder, int.from_bytes(block, "big"))
        holder.next = events.next
        return True

    def forget(self, name: str) -> None:
        """Forget an instance that is gone, or knows nothing of this router any more."""
        holder = self._holders.pop(name, None)
        if holder is None:
            return
        self.touched.add(name)
        self.names = ["" if each == name else each for each in self.names]
        self._clear(holder)
        for block in holder.expected:
            _take_bit(self._expected, block, holder.bit)

    # ---- what was sent there and is not computed yet

    def expect(self, name: str, number: int, blocks: Sequence[int]) -> None:
        """Expect an instance to hold blocks by a dispatch, until :meth:`settle`."""
        if not blocks:
            return
        holder = self._holder(name)
        self.touched.add(name)
        holder.expectations[number] = blocks
        for block in blocks:
            holder.expected[block] += 1
            self._expected[block] = self._expected.get(block, 0) | holder.bit

    def settle(self, name: str, number: int) -> None:
        """End the expectation of a dispatch: it has been computed, or never will be."""
        holder = self._holders.get(name)
        blocks = holder.expectations.pop(number, None) if holder else None
        if holder is None or blocks is None:
            return
        self.touched.add(name)
        for block in blocks:
            holder.expected[block] -= 1
            if not holder.expected[block]:
                del holder.expected[block]
                _take_bit(self._expected, block, holder.bit)

    # ---- looking up

    def prefix_lengths(self, blocks: Sequence[int]) -> dict[str, int]:
        """Number of the leading blocks that each instance has, or is expected to have.

        Instances that have none are left out.
        """
        return self._by_name(self.prefix_groups(blocks))

    def prefix_length(self, name: str, blocks: Sequence[int]) -> int:
        """Number of the leading blocks that one instance has, or is expected to have."""
        holder = self._holders.get(name)
        if holder is None:
            return 0
        stored, expected, bit = self._stored, self._expected, holder.bit
        return next(
            (
                length
                for length, block in enumerate(blocks)
                if not (stored.get(block, 0) | expected.get(block, 0)) & bit
            ),
            len(blocks),
        )

    def prefix_groups(self, blocks: Sequence[int]) -> dict[int, int]:
        """Numbers of leading blocks, by the instances (bits, see :attr:`names`) that have them."""
        if not self._expected:
            return self.stored_groups(blocks)
        stored = map(self._stored.get, blocks, repeat(0))
        return _groups(map(or_, stored, map(self._expected.get, blocks, repeat(0))))

    def stored_groups(self, blocks: Sequence[int]) -> dict[int, int]:
        """Numbers of leading blocks that instances (as bits) hold now, and can lend."""
        return _groups(map(self._stored.get, blocks, repeat(0)))

    def stored_longest_first(self, blocks: Sequence[int]) -> Iterator[tuple[int, Iterator[str]]]:
        """Numbers of leading blocks, largest first, each with the instances that hold them."""
        for bits, length in reversed(self.stored_groups(blocks).items()):
            yield length, self._named(bits)

    def stored_lengths(self, blocks: Sequence[int]) -> dict[str, int]:
        """Number of the leading blocks that each instance has now."""
        return self._by_name(self.stored_groups(blocks))

    def _by_name(self, groups: dict[int, int]) -> dict[str, int]:
        return {name: length for bits, length in groups.items() for name in self._named(bits)}

    def _named(self, bits: int) -> Iterator[str]:
        """Names of the instances with these bits."""
        return compress(self.names, bin(bits)[:1:-1].encode().translate(DIGITS))

    # ---- helpers

    def _holder(self, name: str) -> _Holder:
        holder = self._holders.get(name)
        if holder is None:
            number = self.names.index("") if "" in self.names else len(self.names)
            self.names = [*self.names[:number], name, *self.names[number + 1 :]]
            holder = self._holders[name] = _Holder(1 << number)
        return holder

    def _store(self, holder: _Holder, block: int, *, is_news: bool) -> None:
        bits = self._stored.get(block)
        if bits is None:
            if len(self._stored) >= self._max_blocks:
                return
            bits = 0
            if is_news:
                self.evictions.computed(block)
            else:
                self.evictions.found(block)
        if not bits & holder.bit:
            self._stored[block] = bits | holder.bit
            holder.num_blocks += 1

    def _drop(self, holder: _Holder, block: int) -> None:
        if self._stored.get(block, 0) & holder.bit:
            _take_bit(self._stored, block, holder.bit)
            holder.num_blocks -= 1
            if block not in self._stored:
                self.evictions.dropped(block, len(self._stored))

    def _clear(self, holder: _Holder) -> None:
        if holder.num_blocks:
            for block in [block for block, bits in self._stored.items() if bits & holder.bit]:
                _take_bit(self._stored, block, holder.bit)
        holder.num_blocks = 0


def _groups(holders: Iterable[int]) -> dict[int, int]:
    """Lengths by the bits of those that hold so many of the first blocks."""
    lengths: dict[int, int] = {}
    left, number, before = -1, -1, -1
    for number, bits in enumerate(holders):
        if bits == before:
            continue
        before = bits
        still = left & bits
        if still != left:
            if left != -1:
                lengths[left & ~still] = number
            left = still
            if not left:
                return lengths
    if left > 0:
        lengths[left] = number + 1
    return lengths


def _take_bit(table: dict[int, int], block: int, bit: int) -> None:
    left = table.get(block, 0) & ~bit
    if left:
        table[block] = left
    else:
        table.pop(block, None)
