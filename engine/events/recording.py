"""Changes of a prefix cache become KV events (pure).

The block pool tells names only. Tokens come from the scheduler, once a request shows which ones a block has:
at once for what a step computes, at its admission for blocks that came from elsewhere. Until then such a
block is not published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.events.messages import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from engine.pieces.pool import NAME_BYTES, BlockHash
from engine.scheduling.request import Request

GROUP = 0
"""All layers' blocks are one group of vLLM's."""


def name_of(block_hash: BlockHash) -> int:
    """The name of a block, as outside routers get it."""
    return int.from_bytes(block_hash[:NAME_BYTES], "big")


class EventRecorder:
    """Observes a block pool; :meth:`take` has what is to be published."""

    def __init__(self, block_size: int, adapters: Mapping[str, str]) -> None:
        """``adapters``: names of low-rank adapters by their digest."""
        self._block_size = block_size
        self._adapters = adapters
        self._published: set[BlockHash] = set()
        self._unknown: set[BlockHash] = set()
        """Stored blocks whose tokens are not known yet; at most all of the pool."""
        self._events: list[KvEvent] = [AllBlocksCleared()]
        """Pending events; the first clears what followers know of an earlier instance."""
        self._last: BlockHash | None = None
        """The last block of the event that may go on."""

    def __repr__(self) -> str:
        return f"<EventRecorder {len(self._published)} published, {len(self._unknown)} unknown>"

    @property
    def published(self) -> frozenset[int]:
        """Names that a follower of all events has."""
        return frozenset(map(name_of, self._published))

    @property
    def lacks_tokens(self) -> bool:
        """Whether blocks wait for a request that shows their tokens."""
        return bool(self._unknown)

    def stored(self, block_hash: BlockHash) -> None:
        self._unknown.add(block_hash)

    def dropped(self, block_hash: BlockHash) -> None:
        self._unknown.discard(block_hash)
        if block_hash not in self._published:
            return
        self._published.remove(block_hash)
        self._last = None
        if self._events and isinstance(event := self._events[-1], BlockRemoved):
            event.block_hashes.append(name_of(block_hash))
        else:
            self._events.append(BlockRemoved([name_of(block_hash)], MEDIUM, GROUP))

    def tell(self, request: Request, first: int, end: int) -> None:
        """Record the tokens of blocks ``first`` to ``end - 1`` of a request."""
        hashes = request.hashes
        for index in range(first, end):
            block_hash = hashes[index]
            if block_hash in self._unknown:
                self._unknown.remove(block_hash)
                self._published.add(block_hash)
                start = index * self._block_size
                tokens = request.token_ids[start : start + self._block_size]
                self._store(block_hash, hashes[index - 1] if index else None, tokens, request)

    def clear(self) -> None:
        """Record that the prefix cache is cleared; called before the pool clears it."""
        self._published.clear()
        self._unknown.clear()
        self._last = None
        self._events = [AllBlocksCleared()]

    def take(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        found, self._events = self._events, []
        self._last = None
        return found

    def _store(
        self, block_hash: BlockHash, parent: BlockHash | None, tokens: Sequence[int], request: Request
    ) -> None:
        salt, adapter = request.cache_salt, request.adapter
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and parent is not None and parent == self._last:
            last.block_hashes.append(name_of(block_hash))
            last.token_ids.extend(tokens)
            if last.extra_keys is not None:
                last.extra_keys.append(None)
        else:
            self._events.append(
                BlockStored(
                    block_hashes=[name_of(block_hash)],
                    parent_block_hash=None if parent is None else name_of(parent),
                    token_ids=list(tokens),
                    block_size=self._block_size,
                    lora_id=None,
                    medium=MEDIUM,
                    lora_name=self._adapters.get(adapter, adapter) or None,
                    extra_keys=[(salt,)] if salt and parent is None else None,
                    group_idx=GROUP,
                )
            )
        self._last = block_hash
