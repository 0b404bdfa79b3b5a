"""Movers of several caches, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from coordinator.rpc import keys
from coordinator.rpc.codec import Decoder, encode
from coordinator.rpc.keys import MeshKeys
from engine.transfers import lending_port
from engine.transfers.block_memory import BlockMemory, CacheMemory
from engine.transfers.fetching import TransferEnded, TransferOutcome, Wanted
from engine.transfers.lending import Lookup, Return, SendPiece
from engine.transfers.messages import BlockPiece, Lent, LoanRequest, ToTaker, joined
from engine.transfers.mover import BlockMover, Event
from tests.engine.copying_device import staged
from tests.waiting import until

NUM_BLOCKS = 50
WIDTHS = (64, 64, 256, 40)
"""Bytes of a block in each tensor of a cache."""
NAMES = [bytes([index]) * 16 for index in range(30)]
ANYWHERE = "tcp://127.0.0.1:0"


class End:
    """A cache, its mover, and a step loop that lends what the test has named."""

    memory_of: Callable[[Any], CacheMemory] = BlockMemory

    def __init__(self, seed: int, identity: str = "same", mesh_keys: MeshKeys | None = None) -> None:
        chance = np.random.default_rng(seed)
        self.parts = [chance.integers(0, 256, (NUM_BLOCKS, width), dtype=np.uint8) for width in WIDTHS]
        self.memory = self.memory_of(self.parts)
        self.mover = BlockMover(self.memory, identity, ANYWHERE, mesh_keys, lambda: None)
        self.mover.start()
        self.events: list[Event] = []
        self.lends: dict[bytes, int] = {}
        """Blocks by their names."""

    def turn(self) -> list[Event]:
        for event in self.mover.take_events():
            self.events.append(event)
            if isinstance(event, Lookup):
                known = [self.lends[name] for name in event.names if name in self.lends]
                self.mover.found(event.loan, known)
        return self.events

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.turn() if isinstance(event, kind)]


Make = Callable[..., End]


@pytest.fixture(autouse=True, params=[BlockMemory, staged], ids=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All movers have caches of one sort."""
    monkeypatch.setattr(End, "memory_of", staticmethod(request.param))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[End] = []
    monkeypatch.setattr(lending_port, "PIECE_BYTES", 3 * sum(WIDTHS))

    def end(*args: object, **fields: object) -> End:
        made.append(End(*args, **fields))  # type: ignore[arg-type]
        return made[-1]

    yield end
    for each in made:
        each.mover.close()


def fetch(taker: End, source: End, count: int = 20, number: int = 1, seconds: float = 20.0) -> Wanted:
    blocks = list(range(NUM_BLOCKS - 1, NUM_BLOCKS - 1 - count, -1))
    wanted = Wanted(number, source.mover.address, NAMES[:count], blocks, seconds)
    taker.mover.fetch(wanted)
    return wanted


def end_of(taker: End, *sources: End) -> TransferEnded:
    def look() -> Sequence[Event]:
        for source in sources:
            source.turn()
        return taker.of(TransferEnded)

    until(look)
    (end,) = taker.of(TransferEnded)
    assert isinstance(end, TransferEnded)
    taker.events.clear()
    return end


@pytest.mark.parametrize("with_keys", [False, True])
def test_blocks_arrive_whole_and_nothing_else_changes(make: Make, with_keys: bool) -> None:
    mesh_keys = keys.generate() if with_keys else None
    source, taker = make(1, mesh_keys=mesh_keys), make(2, mesh_keys=mesh_keys)
    source.lends = {name: 3 * index % NUM_BLOCKS for index, name in enumerate(NAMES)}
    before = [part.copy() for part in taker.parts]
    wanted = fetch(taker, source)
    end = end_of(taker, source)
    assert (end.outcome, end.count, end.num_bytes) == (TransferOutcome.WHOLE, 20, 20 * sum(WIDTHS))
    for part, theirs, old in zip(taker.parts, source.parts, before, strict=True):
        for index, block in enumerate(wanted.blocks):
            assert (part[block] == theirs[3 * index % NUM_BLOCKS]).all()
        untouched = [block for block in range(NUM_BLOCKS) if block not in wanted.blocks]
        assert (part[untouched] == old[untouched]).all()
    until(lambda: len(source.of(Return)) == 1)


def test_a_part_of_what_was_asked_comes(make: Make) -> None:
    source, taker = make(1), make(2)
    source.lends = {name: index for index, name in enumerate(NAMES[:7])}
    fetch(taker, source)
    end = end_of(taker, source)
    assert (end.outcome, end.count) == (TransferOutcome.WHOLE, 7)


def test_another_cache_lends_nothing(make: Make) -> None:
    source, taker = make(1), make(2, "other")
    fetch(taker, source)
    end = end_of(taker, source)
    assert (end.outcome, end.for_good) == (TransferOutcome.REFUSED, True)
    assert source.of(Lookup) == []


def test_a_key_of_another_mesh_gets_nothing(make: Make) -> None:
    source, taker = make(1, mesh_keys=keys.generate()), make(2, mesh_keys=keys.generate())
    fetch(taker, source)
    assert end_of(taker, source).outcome is TransferOutcome.LOST
    assert source.events == []


def test_a_source_that_ends_in_the_middle_costs_no_right_block(make: Make) -> None:
    source, taker = make(1), make(2)
    source.lends = {name: index for index, name in enumerate(NAMES)}
    fetch(taker, source)
    until(lambda: source.of(Lookup))  # it has been asked, and lends
    source.mover.close()
    end = end_of(taker)
    assert end.outcome in (TransferOutcome.LOST, TransferOutcome.WHOLE, TransferOutcome.SLOW)
    for index in range(end.count):
        assert (taker.parts[2][NUM_BLOCKS - 1 - index] == source.parts[2][index]).all()


def test_a_source_that_leaves_waits_until_its_last_pieces_were_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a taker has not read when the connection ends is lost to it."""
    monkeypatch.setattr(lending_port, "FAREWELL", 20.0)
    source, taker = make(1), make(2)
    source.lends = {name: index for index, name in enumerate(NAMES)}
    goes_on, write = threading.Event(), taker.memory.write

    def stop(block: int, data: memoryview) -> None:
        goes_on.wait()
        write(block, data)

    monkeypatch.setattr(taker.memory, "write", stop)
    fetch(taker, source)
    until(lambda: source.of(Return))  # all is sent
    closes = threading.Thread(target=source.mover.close)
    closes.start()
    closes.join(0.3)  # without waiting for its taker, it would be closed by then
    goes_on.set()
    assert (end_of(taker).outcome, taker.mover.has_ended) == (TransferOutcome.WHOLE, False)
    closes.join()


def test_a_source_waits_only_so_long_for_a_taker_that_does_not_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending_port, "FAREWELL", 0.05)
    source = make(1)
    source.lends = {name: index for index, name in enumerate(NAMES)}
    taker = RawTaker(source)
    taker.ask(pieces=16)
    until(lambda: source.of(Return))
    source.mover.close()
    assert source.mover.has_ended
    taker.close()


def test_a_step_loop_that_does_not_answer_is_not_waited_for(make: Make) -> None:
    source, taker = make(1), make(2)
    fetch(taker, source, seconds=0.2)
    end = end_of(taker)
    assert (end.outcome, end.count) == (TransferOutcome.SLOW, 0)
    until(lambda: source.of(Return))  # it had asked its step loop, which holds blocks by now


def test_a_mover_rests_without_transfers_and_looks_at_the_next_one(make: Make) -> None:
    """Idle looks cost an idle instance as much as its step loop."""
    source, taker = make(1), make(2)
    ends = (source, taker)
    assert all("at rest" in repr(end.mover) for end in ends)
    for number in (1, 2):
        fetch(taker, source, number=number, seconds=0.5)
        until(lambda: not any("at rest" in repr(end.mover) for end in ends))
        assert end_of(taker).outcome is TransferOutcome.SLOW, "it was looked at"
        until(lambda: source.of(Return))
        source.events.clear()
        until(lambda: all("at rest" in repr(end.mover) for end in ends))


def test_a_flipped_bit_is_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source, taker = make(1), make(2)
    source.lends = {name: index for index, name in enumerate(NAMES)}
    made = source.mover._lending._piece

    def flipped(action: SendPiece) -> BlockPiece:
        piece = made(action)
        if action.first != 9:
            return piece
        data = bytearray(piece.data)
        data[17] ^= 4
        return msgspec.structs.replace(piece, data=bytes(data))

    monkeypatch.setattr(source.mover._lending, "_piece", flipped)
    fetch(taker, source)
    end = end_of(taker, source)
    assert (end.outcome, end.for_good, end.count) == (TransferOutcome.WRONG, True, 9)


class RawTaker:
    """A taker of a test, which says what it likes."""

    def __init__(self, source: End) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(source.mover.address)
        self._decoder: Decoder[ToTaker] = Decoder(ToTaker)

    def ask(self, pieces: int) -> None:
        self._socket.send(encode(LoanRequest(1, "same", joined(NAMES[:20]), pieces)))

    def receive(self) -> ToTaker:
        assert self._socket.poll(5000)
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def test_blocks_are_held_while_a_taker_reads_slowly_and_no_longer_than_it_lives(make: Make) -> None:
    source = make(1)
    source.lends = {name: index for index, name in enumerate(NAMES)}
    taker = RawTaker(source)
    taker.ask(pieces=1)
    until(lambda: source.of(Lookup))
    assert taker.receive() == Lent(1, 20)
    began, questions = time.monotonic(), 0
    while questions < 2:  # it is asked whether it lives, and held all the while
        questions += type(taker.receive()).__name__ == "Held"
    assert time.monotonic() - began < 5
    assert source.of(Return) == []
    taker.close()
    until(lambda: len(source.of(Return)) == 1)
    assert len(source.mover._lending.lender) == 0


def test_garbage_is_dropped(make: Make) -> None:
    source, taker = make(1), make(2)
    source.lends = {name: index for index, name in enumerate(NAMES)}
    raw = RawTaker(source)
    raw._socket.send(b"")
    raw._socket.send(b"\x08garbage")
    raw._socket.send(encode(LoanRequest(1, "same", joined(NAMES[:1]), 1))[:-1])
    fetch(taker, source)
    assert end_of(taker, source).outcome is TransferOutcome.WHOLE
    raw.close()


def test_many_transfers_at_once_take_turns(make: Make) -> None:
    source, taker = make(1), make(2)
    source.lends = {name: index for index, name in enumerate(NAMES)}
    for number in range(12):
        fetch(taker, source, count=2 + number % 2, number=number)

    def look() -> bool:
        source.turn()
        return len(taker.of(TransferEnded)) == 12

    until(look)
    assert {event.outcome for event in taker.events if isinstance(event, TransferEnded)} == {
        TransferOutcome.WHOLE
    }


def test_a_port_that_is_taken_is_an_error() -> None:
    first = End(1)
    with pytest.raises(OSError, match="is in use"):
        BlockMover(first.memory, "same", first.mover.address, None, lambda: None).start()
    first.mover.close()
