"""One instance of the simulator, with real references, loans and fetches.

A block's bytes are the digest of all tokens up to its end, so any other bytes are wrong.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine.inheritance.table import ENTRY_BYTES, Publisher, Table
from engine.messages import Abort, Delta, FinishReason, HandedOver, Prefetch, Prefetched, Submit, Tokens
from engine.pieces.pool import BlockHash, PiecePool, hash_block
from engine.scheduling.request import Request, RequestKey, Status, from_submit
from engine.transfers import fetching, lending
from engine.transfers.exchange import BlockExchange
from engine.transfers.fetching import DEAD, Fetcher, TransferEnded, TransferOutcome, Wanted
from engine.transfers.lending import Key, Lender, Lookup, Return
from engine.transfers.messages import BlockPiece, Holder, ToTaker, digest_of
from engine.transfers.price import FetchPrice
from engine.transfers.sources import Sources

SIZE = 16
"""Tokens of a block, and its bytes here."""
IDENTITY = "one"
ROUTER = b"router"


class Rule(enum.StrEnum):
    """What no schedule may break."""

    CONTENT = "a block that is named, or computed upon, has the bytes of its tokens"
    ONCE = "a request runs at one instance"
    ANSWER = "a client gets its tokens, each once"
    END = "nothing is held in the end"


class Broken(Exception):
    """A broken rule."""

    def __init__(self, rule: Rule, what: str) -> None:
        super().__init__(f"{rule.name}: {rule}: {what}")
        self.rule = rule


def next_token(tokens: Sequence[int]) -> int:
    """What the model of this world says."""
    return (31 * tokens[-1] + len(tokens)) % 997


class SimulatedHeir:
    """Copies blocks of dead instances one by one; between two of them anything may happen."""

    def __init__(self, node: Node, world: Any) -> None:
        self._node, self._world = node, world
        self._cancelled: set[int] = set()
        self._ended: list[TransferEnded] = []

    def fetch(self, wanted: Wanted) -> None:
        self._node.calls.append(partial(self._copy, wanted, 0))

    def cancel(self, number: int) -> None:
        self._cancelled.add(number)

    def take_events(self) -> list[TransferEnded]:
        found, self._ended = self._ended, []
        return found

    @property
    def has_events(self) -> bool:
        return bool(self._ended)

    def _copy(self, wanted: Wanted, index: int) -> None:
        owner = wanted.source.removeprefix(DEAD)
        if wanted.number in self._cancelled:
            return self._end(wanted, index, TransferOutcome.CANCELLED)
        if owner not in self._world.dead or owner in self._world.released:
            return self._end(wanted, index, TransferOutcome.LOST)
        dead = self._world.nodes[owner]
        if index == len(wanted.names):
            return self._end(wanted, index, TransferOutcome.WHOLE)
        block = Table(memoryview(dead.table), owner).read().get(wanted.names[index])
        if block is None:
            return self._end(wanted, index, TransferOutcome.WHOLE if index else TransferOutcome.ABSENT)
        self._node.memory[wanted.blocks[index]] = dead.memory[block]
        self._world.seen["inherited"] += 1
        self._node.calls.append(partial(self._copy, wanted, index + 1))

    def _end(self, wanted: Wanted, count: int, outcome: TransferOutcome) -> None:
        self._ended.append(TransferEnded(wanted.number, count, outcome, wanted.source, count * SIZE, 0.0))


class Node:
    """An instance; what its two threads do next is chosen by the world."""

    lender_class: type[Lender] = Lender
    fetcher_class: type[Fetcher] = Fetcher
    publisher_class: type[Publisher] = Publisher

    def __init__(self, name: str, world: Any, num_blocks: int, *, inherits: bool = False) -> None:
        self.name, self.address = name, f"at {name}"
        self._world = world
        draws = random.Random(f"{name} of {world.seed}")
        self._clock_start, self._clock_rate = draws.choice((0.0, 10**6)), draws.uniform(0.9, 1.1)
        self.pool = PiecePool(num_blocks)
        self.memory = [b"junk"] * num_blocks
        self.lender, self.fetcher = (
            self.lender_class(IDENTITY, 1),
            self.fetcher_class(IDENTITY, lambda _: SIZE),
        )
        self.is_piped = draws.random() < 0.5
        """Requests come and go while a step is under way, as in a pipeline."""
        self.heir = SimulatedHeir(self, world) if inherits else None
        sources = Sources(self, FetchPrice(1.0), lambda: self.now, heir=self.heir)
        self.exchange = BlockExchange(self.pool, sources, SIZE, in_flight=lambda: self.in_flight)
        self.table = bytearray(num_blocks * ENTRY_BYTES)
        """Outlives the instance, as its memory does."""
        self.publisher: Publisher | None = None
        if inherits:
            self.publisher = self.publisher_class(self.pool, Table(memoryview(self.table), name))
            self.pool.observe(self.publisher)
        self.has_ended = False
        self.events: deque[Any] = deque()
        self.calls: deque[Callable[[], None]] = deque()
        """Work of the mover's thread."""
        self.inbox: deque[Any] = deque()
        """Messages of the router."""
        self.queue: list[Request] = []
        self.running: list[Request] = []
        self.filling: list[tuple[int, bytes]] = []
        """Blocks that the step under way writes."""
        self.stepped: list[Request] = []
        self.in_flight: set[int] = set()
        """Blocks that the step under way reads or writes, also of requests that are gone."""
        self.arrivals = 0

    @property
    def now(self) -> float:
        """What its own clock shows; those of two instances have nothing in common."""
        return float(self._clock_start + self._clock_rate * self._world.now)

    # ---- the mover, as the exchange sees it

    def take_events(self) -> list[Any]:
        found = list(self.events)
        self.events.clear()
        return found

    def fetch(self, wanted: Wanted) -> None:
        self.calls.append(partial(self._begin, wanted))

    def cancel(self, number: int) -> None:
        self.calls.append(lambda: self.carry_out(self.fetcher.cancel(number, self.now)))

    def found(self, loan: Key, blocks: Sequence[int]) -> None:
        self.calls.append(lambda: self.lend(self.lender.found(loan, blocks)))

    def handed_over(
        self, loan: Key, names: Sequence[BlockHash], blocks: Sequence[int], *, has_part: bool
    ) -> None:
        self.calls.append(lambda: self.lend(self.lender.handed_over(loan, names, blocks, has_part=has_part)))

    def refuse(self, loan: Key, reason: str) -> None:
        self.calls.append(lambda: self.lend(self.lender.refused(loan, reason)))

    def same(self, one: int, other: int) -> bool:
        return self.memory[one] == self.memory[other]

    def _begin(self, wanted: Wanted) -> None:
        self.fetcher.begin(wanted, self.now)
        self.ask()

    def ask(self) -> None:
        for number, source in self.fetcher.due(self.now):
            if self._world.to_source(self, source, self.fetcher.ask(number)):
                self.fetcher.asked(number)

    def carry_out(self, actions: Sequence[fetching.Action]) -> None:
        for action in actions:
            match action:
                case fetching.Write(block, data):
                    self.memory[block] = bytes(data)
                case fetching.SendToSource(source, message):
                    self._world.to_source(self, source, message)
                case TransferEnded():
                    self.events.append(action)
        if any(isinstance(action, TransferEnded) for action in actions):
            self.ask()

    def lend(self, actions: Sequence[lending.Action]) -> None:
        for action in actions:
            match action:
                case lending.SendToTaker(peer, message):
                    self._world.to_taker(self, peer, message)
                case lending.SendPiece():
                    self._world.to_taker(self, action.peer, self._piece(action))
                case Lookup() | Return():
                    self.events.append(action)

    def _piece(self, action: lending.SendPiece) -> BlockPiece:
        data = [self.memory[block] for block in action.blocks]
        digests = [
            digest_of(IDENTITY, name, bytes(each)) for name, each in zip(action.names, data, strict=True)
        ]
        return BlockPiece(action.number, action.first, b"".join(digests), b"".join(data))

    def look(self) -> None:
        """End fetches that take too long, and begin others."""
        self.carry_out(self.fetcher.look(self.now))
        self.ask()
        self.lend(self.lender.waiting())

    def received(self, source: str, message: ToTaker) -> None:
        self.carry_out(self.fetcher.received(source, message, self.now))

    # ---- the step loop

    def turn(self) -> None:
        """Between two steps, or while one is under way."""
        being_filled = {block for block, _ in self.filling}
        self.queue += self.exchange.turn(lambda: being_filled, self._holder)
        for key in self.exchange.take_handed_over():
            self.let_go(key)
            self._world.to_router(self, HandedOver(key[1]))
        for (_, number), tokens, is_taken in self.exchange.take_copied():
            self._world.to_router(self, Prefetched(number, tokens, is_taken))
        if self.publisher is not None:
            self.publisher.turn(lambda: being_filled)
        self.check()

    def let_go(self, key: RequestKey) -> None:
        """Forget a request that another instance takes over."""
        self._world.seen["handed over"] += 1
        self.forget(key)

    def _holder(self, holder: Holder) -> Request | None:
        found = [each for each in [*self.running, *self.queue] if each.key == (ROUTER, holder[1])]
        for request in found:
            request.status = Status.RUNNING if request in self.running else Status.WAITING
            request.num_in_flight = int(request in self.stepped)
        return found[0] if found else None

    def take_in(self) -> None:
        """Read one message of the router."""
        if not self.inbox or (self.stepped and not self.is_piped):
            return
        match message := self.inbox.popleft():
            case Submit():
                self.arrivals += 1
                request = from_submit(
                    message, ROUTER, arrival=self.arrivals, eos_ids=(), max_model_len=10_000
                )
                if not self.exchange.takes(request):
                    self.queue.append(request)
            case Abort(numbers):
                for number in numbers:
                    self.forget((ROUTER, number))
            case Prefetch():
                names: list[BlockHash] = []
                for start in range(0, (len(message.token_ids) - 1) // SIZE * SIZE, SIZE):
                    parent = names[-1] if names else None
                    names.append(hash_block(parent, message.token_ids[start : start + SIZE]))
                key = ROUTER, message.number
                if message.request:
                    self.exchange.take_over(key, names, message.blocks_at, ("router", message.request))
                else:
                    self.exchange.copy(key, names, message.blocks_at)

    def forget(self, key: RequestKey) -> None:
        if self.exchange.forget(key):
            return
        for request in [each for each in self.running if each.key == key]:
            self.pool.release(request.blocks)
            self.running.remove(request)
        self.queue = [each for each in self.queue if each.key != key]

    def begin_step(self) -> None:
        if self.stepped:
            return
        while self.queue and self._admit(self.queue[0]):
            self.running.append(self.queue.pop(0))
        for request in self.running[:]:
            tokens = len(request.token_ids)
            new = self.pool.take(-(-tokens // SIZE) - len(request.blocks))
            if new is None:  # preempted: it is computed again
                self.running.remove(request)
                self.pool.release(request.blocks)
                request.blocks, request.num_computed = [], 0
                self.queue.insert(0, request)
                continue
            request.blocks += new
            for index in range(request.num_computed // SIZE, len(request.blocks)):
                part = request.token_ids[index * SIZE : (index + 1) * SIZE]
                parent = request.hashes_up_to(index, SIZE)[-1] if index else None
                self.filling.append((request.blocks[index], hash_block(parent, part)))
            request.num_computed = tokens
            for index, name in enumerate(request.hashes_up_to(tokens // SIZE, SIZE)):
                self.pool.name(request.blocks[index], name)
            self.stepped.append(request)
            self.in_flight.update(request.blocks)

    def _admit(self, request: Request) -> bool:
        names = request.prefix_hashes(SIZE)
        known = self.pool.find_prefix(names)
        name = request.name_of_part(SIZE) if request.copy and len(known) == len(names) else None
        part = None if name is None else self.pool.parts.find(name)
        here = known if part is None else [*known, part]
        if self.pool.num_free_beside(here) < -(-len(request.token_ids) // SIZE) - len(here):
            return False
        self.pool.hold(known)
        request.blocks, request.num_computed = here, len(known) * SIZE
        if part is not None:
            if self.memory[part] != name:
                raise Broken(Rule.CONTENT, f"{self.name}, {request!r}, partly filled block {part}")
            self.pool.go_on_in(part)
            self._world.seen["parts"] += 1
        return True

    def end_step(self) -> None:
        for block, content in self.filling:
            self.memory[block] = content
        stepped, self.stepped, self.filling, self.in_flight = self.stepped, [], [], set()
        stepped = [request for request in stepped if request in self.running]
        deltas = []
        for request in stepped:
            self.check_request(request)
            token = next_token(request.token_ids)
            request.token_ids.append(token)
            ends = request.num_output >= request.max_output
            deltas.append(Delta(request.key[1], [token], FinishReason.LENGTH if ends else None))
            if ends:
                self.running.remove(request)
                self.pool.release(request.blocks)
        if deltas:
            self._world.to_router(self, Tokens(deltas))
        self.check()

    def die(self, chance: Callable[[], float]) -> None:
        """Nothing of it goes on; blocks of its step are written, half written, or not."""
        for block, content in self.filling:
            if (drawn := chance()) < 0.7:
                self.memory[block] = content if drawn < 0.3 else content[: SIZE // 2] + b"........"

    # ---- checks

    def check(self) -> None:
        """Named blocks have the bytes of their names."""
        filling, memory = {block for block, _ in self.filling}, self.memory
        for block, name in self.pool._hash_of.items():
            if memory[block] != name and block not in filling:
                raise Broken(Rule.CONTENT, f"{self.name}, block {block}")

    def check_request(self, request: Request) -> None:
        """Blocks that a request computed upon have the bytes of its tokens."""
        names = request.hashes_up_to(request.num_computed // SIZE, SIZE)
        for block, name in zip(request.blocks, names, strict=False):
            if self.memory[block] != name:
                raise Broken(Rule.CONTENT, f"{self.name}, {request!r}, block {block}")
