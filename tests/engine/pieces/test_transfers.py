"""Toy states that travel between real schedulers: fetched, handed over, read from files."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.scheduling.request import Request
from engine.tiers.block_files import BlockFiles
from engine.tiers.file_tier import FileTier
from engine.transfers import price
from engine.transfers.exchange import BlockExchange
from engine.transfers.messages import Holder
from engine.transfers.mover import BlockMover
from engine.transfers.price import FetchPrice
from engine.transfers.sources import Sources
from tests.engine.pieces.toy import ToyBench
from tests.engine.scheduling.test_scheduler import tokens
from tests.engine.simulated_executor import expected_output
from tests.waiting import PATIENCE, until

BLOCK, GRID = 4, 8


@pytest.fixture(autouse=True)
def is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch even little."""
    monkeypatch.setattr(price, "WORTH", float("inf"))
    monkeypatch.setattr(price, "FEWEST", 1)


class Node(ToyBench):
    """An instance that lends and fetches, without routers."""

    def __init__(self, root: Path | None = None, **settings: Any) -> None:
        super().__init__(block_size=BLOCK, grid=GRID, num_blocks=120, budget=64, **settings)
        memory = self.memory()
        self.mover = BlockMover(memory, "same", "tcp://127.0.0.1:0", None, lambda: None, self.pool.kinds)
        self.mover.start()
        self.tier = None
        if root is not None:
            files = BlockFiles(root, "model/class", "same")
            self.tier = FileTier(self.pool, memory, files, 1 << 30, lambda: None)
            self.tier.start()
        self.exchange = BlockExchange(
            self.pool, Sources(self.mover, FetchPrice(16.0), tier=self.tier), BLOCK,
            in_flight=self.scheduler.blocks_in_flight,
        )  # fmt: skip

    def ask(self, prompt: list[int], max_tokens: int = 5, **fields: Any) -> int:
        request = self.request(prompt, max_tokens, **fields)
        if not self.exchange.takes(request):
            self.scheduler.add(request)
        return request.key[1]

    def turn(self) -> None:
        self.exchange_blocks()
        self.step()

    def exchange_blocks(self) -> None:
        for request in self.exchange.turn(self.scheduler.blocks_being_filled, self._holder):
            self.scheduler.add(request)
        for key in self.exchange.take_handed_over():
            self.scheduler.abort(key)

    def _holder(self, holder: Holder) -> Request | None:
        return self.scheduler.queues.find((b"router", holder[1]))

    @property
    def is_done(self) -> bool:
        if self.tier is not None and (self.tier.policy.num_held or len(self.tier.policy)):
            return False
        return self.exchange.is_idle and not self.exchange.waiting and not self.scheduler.queues.has_work

    def close(self) -> None:
        self.mover.close()
        if self.tier is not None:
            self.tier.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def node(*args: Any, **settings: Any) -> Node:
        made.append(Node(*args, **settings))
        return made[-1]

    yield node
    for each in made:
        each.close()


def run(*nodes: Node) -> None:
    deadline = time.monotonic() + PATIENCE
    while not all(each.is_done for each in nodes):
        assert time.monotonic() < deadline
        for each in nodes:
            each.turn()
    for each in nodes:
        each.finish()


@pytest.mark.parametrize("num_kinds", [1, 2])
def test_a_prefix_is_fetched_with_the_state_behind_it(make: Callable[..., Node], num_kinds: int) -> None:
    source, taker = make(num_kinds=num_kinds), make(num_kinds=num_kinds)
    prompt = tokens(1, 50)
    source.ask(prompt)
    run(source)
    number = taker.ask(prompt, blocks_at=source.mover.address)
    assert number not in [key for _, key in taker.scheduler.queues._requests], "it waits for blocks"
    run(source, taker)
    assert taker.outputs[number] == expected_output(prompt, 5)
    assert taker.requests[number].num_cached == 48
    assert taker.executor.computed_tokens == 2 + 4
    kinds = taker.pool.kinds
    links = taker.requests[number].hashes[:12]
    ours, theirs = taker.memory(), source.memory()
    for name in kinds.names_behind(links):
        slot, other = taker.pool.slot_of(name), source.pool.slot_of(name)
        assert slot is not None
        assert other is not None
        assert list(map(bytes, ours.parts_of(slot))) == list(map(bytes, theirs.parts_of(other)))


def test_a_source_lends_up_to_the_last_state_that_it_has(make: Callable[..., Node]) -> None:
    source, taker = make(), make()
    prompt = tokens(1, 50)
    first = source.ask(prompt, max_tokens=1)
    run(source)
    links = source.requests[first].hashes
    source.pool.unname(source.pool.kinds.boundary_names(links[11]))
    number = taker.ask(prompt, blocks_at=source.mover.address)
    run(source, taker)
    assert taker.requests[number].num_cached == 40, "kept 8 tokens back from the end"
    assert taker.outputs[number] == expected_output(prompt, 5)


def test_a_running_request_is_handed_over_with_its_newest_state(make: Callable[..., Node]) -> None:
    source, taker = make(), make()
    prompt = tokens(1, 21)
    first = source.ask(prompt, max_tokens=30)
    for _ in range(15):
        source.turn()
    given = source.outputs[first][:]
    assert len(given) == 15
    ids = prompt + given
    names = source.requests[first].hashes_up_to((len(ids) - 1) // BLOCK, BLOCK)
    taker.exchange.take_over((b"router", 7), names, source.mover.address, ("a", first))
    copied: list[tuple[tuple[bytes, int], int, bool]] = []

    def ended() -> bool:
        source.exchange_blocks()  # steps of the toy are faster than messages
        taker.exchange_blocks()
        copied.extend(taker.exchange.take_copied())
        return bool(copied)

    until(ended)
    assert copied[0][2], "the request goes no further at its source"
    number = taker.request(prompt, 30, output_ids=given).key[1]
    taker.scheduler.add(taker.requests[number])
    run(source, taker)
    assert source.outputs[first] == given
    assert given + taker.outputs[number] == expected_output(prompt, 30)
    assert taker.executor.computed_tokens <= GRID + 30 - len(given)
    assert source.is_done


def test_a_restart_goes_on_from_files(make: Callable[..., Node], tmp_path: Path) -> None:
    first = make(tmp_path)
    prompt = tokens(1, 50)
    first.ask(prompt)
    run(first)
    assert first.tier is not None
    first.tier.close()
    second = make(tmp_path)
    number = second.ask(prompt)
    run(second)
    assert second.requests[number].num_cached == 48
    assert second.outputs[number] == expected_output(prompt, 5)
    assert second.executor.computed_tokens == 2 + 4


@pytest.mark.parametrize("seed", range(6))
def test_requests_come_and_go_while_states_travel(
    make: Callable[..., Node], tmp_path: Path, seed: int
) -> None:
    """Free slots hold NaN on both sides; small pools, aborts, and slots that loans hold."""
    rng = random.Random(seed)
    nodes = [make(tmp_path if seed % 2 else None, num_states=rng.choice([4, 8, 30])) for _ in range(2)]
    wanted: list[tuple[Node, int, list[int], int]] = []
    for _ in range(60):
        node, other = rng.sample(nodes, 2)
        draw = rng.random()
        if draw < 0.4:
            prompt = tokens(rng.randrange(3), rng.randrange(1, 90))
            most = rng.randrange(1, 20)
            number = node.ask(prompt, most, blocks_at=rng.choice(["", other.mover.address]))
            wanted.append((node, number, prompt, most))
        elif draw < 0.5 and wanted:
            node, number, prompt, most = rng.choice(wanted)
            if node.exchange.forget((b"router", number)) or node.scheduler.abort((b"router", number)):
                wanted.remove((node, number, prompt, most))
        for each in nodes:
            each.turn()
    run(*nodes)
    for node, number, prompt, most in wanted:
        assert node.outputs[number] == expected_output(prompt, most)
