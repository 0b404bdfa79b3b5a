"""An instance of a model with states in this process, with movers and files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.core import EngineCore
from engine.inheritance.heir import Heir
from engine.messages import Submit, TransferCounters
from engine.scheduling.request import from_submit
from engine.tiers.block_files import BlockFiles
from engine.tiers.file_tier import FileTier
from engine.transfers.identity import CacheFacts, identity_of
from engine.transfers.mover import BlockMover
from tests.engine.invariance.answers import PEER, Answer, Answers, How, Instance, step
from tests.waiting import PATIENCE

CACHE = 8192
"""Tokens of an instance's cache."""


class Serving:
    """An instance that lends and fetches, reads and writes files, and inherits; without routers."""

    def __init__(
        self,
        instance: Instance,
        *,
        files: Path | None = None,
        inherits: bool = False,
        states: int = 64,
        check_interval: int = 0,
        how: How | None = None,
        submits: Sequence[Submit] = (),
    ) -> None:
        """``submits``: requests for which ``how`` has drafts."""
        self.core: EngineCore = instance.core(how or How(cache=CACHE, states=states), submits)
        self.pool, size = self.core.pool, instance.block_size
        memory = instance.executor.block_memory()
        assert memory is not None
        self.memory = memory
        self.identity = identity_of(self.facts(instance))
        self.grid = self.pool.kinds.step
        self.tier = None
        if files is not None:
            kept = BlockFiles(files, "tiny/tested", self.identity)
            self.tier = FileTier(self.pool, memory, kept, 1 << 30, lambda: None)
            self.tier.start()
        kinds = self.pool.kinds
        self.heir = Heir(memory, self.identity, lambda: None, kinds) if inherits else None
        self.mover = BlockMover(memory, self.identity, "tcp://127.0.0.1:0", None, lambda: None, kinds)
        self.mover.start()
        self.core.sharing.exchange_blocks(
            self.mover,
            address=self.mover.address,
            identity=self.identity,
            token_bytes=memory.block_bytes / size,
            end_bytes=memory.bytes_of(self.pool.num_blocks),
            checks=True,
            check_interval=check_interval,
            tier=self.tier,
            heir=self.heir,
        )
        self.found: Answers = {}
        self.fetched: list[tuple[bytes, object]] = []

    def facts(self, instance: Instance, **changes: object) -> CacheFacts:
        kinds = self.pool.kinds.boundaries
        facts = CacheFacts(
            numerics="tested", dtype="bfloat16", block_size=instance.block_size, layout=self.memory.layout,
            shards=self.memory.shards, boundaries=[(each.label, each.grid, each.form) for each in kinds],
        )  # fmt: skip
        return msgspec.structs.replace(facts, **changes)

    def submit(self, submits: Sequence[Submit], blocks_at: str = "") -> None:
        for each in submits:
            self.found[each.request] = Answer(list(each.output_ids))
            assert self.core.submit(PEER, msgspec.structs.replace(each, blocks_at=blocks_at)) is None

    def answers(self, submits: Sequence[Submit], blocks_at: str = "", *others: Serving) -> Answers:
        """Answers to requests that come at once, while others go on."""
        self.submit(submits, blocks_at)
        serve(self, *others)
        return {each.request: self.found[each.request] for each in submits}

    def turn(self) -> None:
        self.fetched += self.core.take_fetched()
        step(self.core, self.found, lambda: time.sleep(0.0005))

    def known_states(self) -> set[bytes]:
        """Names of the states that others can find here."""
        found = {name: self.pool.slot_of(name) for name in self.pool.known}
        return {name for name, slot in found.items() if slot is not None and slot >= self.pool.num_blocks}

    def names_of(self, submit: Submit) -> list[bytes]:
        """Names of what others can go on behind of a prompt: blocks, then the state."""
        request = from_submit(submit, PEER, arrival=1, eos_ids=(), max_model_len=10**6)
        names = request.prefix_hashes(self.core.sharing._block_size)
        return self.pool.kinds.names_behind(names[: len(self.pool.find_prefix(names))])

    @property
    def num_computed(self) -> int:
        """Tokens that were computed here."""
        return self.core.scheduler.counters().scheduled_tokens

    @property
    def counters(self) -> TransferCounters:
        exchange = self.core.sharing.exchange
        assert exchange is not None
        return exchange.counters()

    def close(self) -> None:
        self.mover.close()
        if self.tier is not None:
            self.tier.close()
        if self.heir is not None:
            self.heir.close()


def serve(*instances: Serving) -> None:
    """Turns of all instances until none has anything to do."""
    deadline = time.monotonic() + PATIENCE
    while not all(each.core.is_empty and not each.core.sharing.is_lending for each in instances):
        assert time.monotonic() < deadline
        for each in instances:
            each.turn()
