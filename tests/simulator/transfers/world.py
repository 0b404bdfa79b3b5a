"""A router, three instances, and the connections between them; a schedule is a seed."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import msgspec

from coordinator.messages import Load, Member, State, View
from engine.messages import Abort, Capacity, Leaving
from engine.pieces.pool import hash_block
from engine.sampling import SamplingParams
from engine.transfers.fetching import DEAD
from engine.transfers.messages import BlockPiece
from router.dispatch.chooser import Chooser
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.mover import RequestMover
from router.dispatch.pool import Pool
from router.dispatch.receiver import MessageReceiver
from router.faults import Faults
from router.mesh import Prompt
from tests.simulator.transfers.node import IDENTITY, SIZE, Broken, Node, Rule, next_token

NAMES = ("a", "b", "c")
TURNS, CALM_TURNS = 700, 3500
"""Turns in which something may happen; in calm schedules most requests have begun."""
WORK = (0, 0, 0, 1, 1, 1, 1, 2, 3, 4, 4, 4, 4, 4, 5, 5, 6, 6, 6, 6, 6, 6, 7)
"""Kinds of work, as often as they are drawn."""
SLOW_WIRES = (0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4, 5, 5, 5, 6, 7)
"""The same in every other schedule: many steps pass while a loan is read."""
FAST_WIRES = (0,) * 6 + (1,) * 8 + (2, 3) + (4,) * 8 + (5,) * 8 + (6,) * 8 + (7,)
"""The same in calm schedules: few steps pass while blocks travel."""
MOST_CUTS = 3
"""Cuts of a schedule on average, where there are any."""
MOST_RETRIES = 20
"""Clients on average that go in the middle of a step, and come again."""
MOST_TURNS = 400_000
"""Turns within which everything ends once no faults come any more."""


class Link:
    """The router's connection to an instance."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def send(self, message: Any, growth: int = 0) -> bool:
        self.node.inbox.append(message)
        return True

    def ask_for_blocks(self) -> None: ...

    def close(self) -> None: ...


class World:
    """All parts; :meth:`run` draws what happens next until all is over."""

    node_class: type[Node] = Node
    mover_class: type[RequestMover] = RequestMover

    def __init__(self, seed: int, *, inherits: bool = False) -> None:
        """``inherits``: caches outlive their instances, and others copy from them."""
        self.seed = seed
        self.chance = chance = random.Random(seed)
        self.is_calm = seed % 3 == 2
        """Long answers, fast wires and few faults: many requests are handed over."""
        self.work = FAST_WIRES if self.is_calm else SLOW_WIRES if seed % 2 else WORK
        self.now = 0.0
        self.seen: Counter[str] = Counter()
        """What happened, by kind: a simulator that never moves a block shows nothing."""
        blocks = chance.choice([30, 60] if self.is_calm else [20, 24, 30, 60])
        self.inherits = inherits
        self.nodes = {name: self.node_class(name, self, blocks, inherits=inherits) for name in NAMES}
        self.generation: Counter[tuple[str, str]] = Counter()
        self.to_sources: dict[bytes, deque[Any]] = {}
        self.to_takers: dict[bytes, deque[Any]] = {}
        self.to_routers: deque[tuple[str, Any]] = deque()
        self.entries: list[Entry] = []
        self.dead: set[str] = set()
        self.leaving: set[str] = set()
        self.released: set[str] = set()
        """The dead whose memory is gone as well."""
        self._cut: set[frozenset[str]] = set()
        """Pairs without a way between them; the router reaches both."""
        self._cuts = random.Random(f"cuts {seed}")
        self.has_cuts = self._cuts.random() < 0.4
        self._set_up(blocks)

    def _set_up(self, blocks: int) -> None:
        self.pool, self.ledger = Pool(), Ledger()
        self.links: dict[str, Any] = {name: Link(node) for name, node in self.nodes.items()}
        chooser, faults = Chooser(self.pool, self.ledger), Faults()
        self.mover = self.mover_class(self.pool, self.ledger, chooser, self.links, faults, moves_queued=False)
        self.receiver = MessageReceiver(self.pool, self.ledger, self.links, self.mover, faults)
        members = [
            Member(instance=name, rank=rank, state=State.READY, phase="", address="a", host="", pid=1, load=Load())
            for rank, name in enumerate(NAMES)
        ]  # fmt: skip
        self.pool.apply(View(epoch=1, size=3, settings=None, members=members, waiting_for=""), 0.0)
        for instance in self.pool:
            instance.attached = True
            instance.capacity = Capacity(
                SIZE, blocks, 64, 512, 100, blocks_at=f"at {instance.name}", cache_identity=IDENTITY,
                inherited_at=DEAD + instance.name if self.inherits else "",
            )  # fmt: skip

    # ---- wires

    def to_source(self, taker: Node, source: str, message: Any) -> bool:
        name = source.removeprefix("at ")
        if name in self.dead or {taker.name, name} in self._cut:
            return False
        self.to_sources.setdefault(self._peer(taker.name, name), deque()).append(message)
        return True

    def to_taker(self, source: Node, peer: bytes, message: Any) -> None:
        taker, name, _ = peer.decode().split("/")
        if peer != self._peer(taker, name) or taker in self.dead:
            return  # the connection is gone; another event tells the source
        if isinstance(message, BlockPiece) and self.chance.random() < 0.04:
            data = bytearray(message.data)
            data[self.chance.randrange(len(data))] ^= 1
            message = msgspec.structs.replace(message, data=bytes(data))
        self.to_takers.setdefault(peer, deque()).append(message)

    def to_router(self, node: Node, message: Any) -> None:
        self.to_routers.append((node.name, message))

    def _peer(self, taker: str, source: str) -> bytes:
        return f"{taker}/{source}/{self.generation[taker, source]}".encode()

    # ---- what may happen

    def arrive(self) -> None:
        first = self.chance.randrange(3)
        ids = [1 + (first * 100 + index) % 900 for index in range(self.chance.randrange(70, 200))]
        prompt = Prompt(
            request_id=str(len(self.entries)),
            prompt_ids=ids,
            params=SamplingParams(
                max_tokens=self.chance.randrange(*((60, 200) if self.is_calm else (1, 60)))
            ),
            seed=1,
        )
        self.mover.generate(prompt)
        entry = list(self.mover.streams)[-1]
        self.entries.append(entry)
        assert entry.address is not None
        self._name_source(ids, entry.address[0])

    def _name_source(self, ids: list[int], target: str) -> None:
        """Name an instance that has blocks of a prompt in its submit.

        It may have lost them by the time.
        """
        first, inbox = hash_block(None, ids[:SIZE]), self.nodes[target].inbox
        names = [each for each in NAMES if each != target]
        known = [name for name in names if self.nodes[name].pool.knows(first)]
        source = self.nodes[
            self.chance.choice(known if known and self.chance.random() < 0.7 else names)
        ].address
        inbox[-1] = msgspec.structs.replace(inbox[-1], blocks_at=source)

    def leave_request(self) -> None:
        alive = [entry for entry in self.entries if entry in self.mover.streams]
        if alive:
            entry = self.chance.choice(alive)
            self.mover.forget(entry)
            self.entries.remove(entry)

    def break_connection(self, taker: str, source: str) -> None:
        old = self._peer(taker, source)
        self.generation[taker, source] += 1
        self.to_sources.pop(old, None)
        self.to_takers.pop(old, None)
        lender, fetcher = self.nodes[source], self.nodes[taker]
        lender.calls.append(lambda: lender.lend(lender.lender.gone(old)))
        fetcher.calls.append(lambda: fetcher.carry_out(fetcher.fetcher.broke(lender.address, fetcher.now)))

    def cut(self) -> None:
        """Cut the way between two instances, or mend all ways."""
        if self._cut and self._cuts.random() < 0.6:
            self._cut.clear()
            return
        one, other = self._cuts.sample(NAMES, 2)
        self.seen["cuts"] += 1
        self._cut.add(frozenset((one, other)))
        self.break_connection(one, other)
        self.break_connection(other, one)

    def drain(self, name: str) -> None:
        self.seen["drains"] += 1
        self.leaving.add(name)
        self.to_router(self.nodes[name], Leaving())

    def kill(self, name: str) -> None:
        self.seen["kills"] += 1
        self.dead.add(name)
        if self.inherits:
            self.nodes[name].die(self.chance.random)
        for other in NAMES:
            if other != name:
                self.break_connection(other, name)
                self.break_connection(name, other)
        self.to_routers = deque(each for each in self.to_routers if each[0] != name)
        self.receiver.connection_broke(self.pool.get(name))  # type: ignore[arg-type]

    def _lose_one(self) -> None:
        name = self.chance.choice(NAMES)
        if self.inherits and name in self.dead:
            self.released.add(name)
        if name in self.dead or len(self.dead | self.leaving | {name}) == len(NAMES):
            return
        if self.inherits:  # most in the middle of a step, whose blocks are then half done
            if self.nodes[name].filling or self.chance.random() < 0.2:
                self.kill(name)
        elif name not in self.leaving and self.chance.random() < 0.7:
            self.drain(name)
        elif self.chance.random() < 0.5:
            self.kill(name)

    def go_on(self) -> None:
        """Have one thread, or one wire, do its next piece of work."""
        self.now += self.chance.choice([0.0, 0.0, 0.0005, 0.001, 0.5 * (self.chance.random() < 0.02)])
        name = self.chance.choice([each for each in NAMES if each not in self.dead])
        node = self.nodes[name]
        match self.chance.choice(self.work):
            case 0:
                node.take_in()
            case 1:
                node.turn()
            case 2:
                node.begin_step()
            case 3:
                node.end_step()
            case 4 if node.calls:
                node.calls.popleft()()
            case 5 if self.to_routers:
                sender, message = self.to_routers.popleft()
                self.receiver.received(self.pool.get(sender), message)  # type: ignore[arg-type]
                self._check_once()
            case 6:
                self._deliver()
            case 7:
                node.look()

    def _deliver(self) -> None:
        wires = [(False, peer) for peer, wire in self.to_sources.items() if wire]
        wires += [(True, peer) for peer, wire in self.to_takers.items() if wire]
        if not wires:
            return
        is_answer, peer = self.chance.choice(wires)
        taker, source, _ = peer.decode().split("/")
        if is_answer:
            self.nodes[taker].received(self.nodes[source].address, self.to_takers[peer].popleft())
        else:
            node = self.nodes[source]
            node.lend(node.lender.received(peer, self.to_sources[peer].popleft()))

    # ---- a schedule

    def run(self) -> None:
        """Let things happen, then let all come to their end.

        Raises:
            Broken: a rule is.
        """
        turns = CALM_TURNS if self.is_calm else TURNS
        for _ in range(turns):
            if self._cuts.random() < MOST_CUTS / turns and self.has_cuts:
                self.cut()
            if self._cuts.random() < MOST_RETRIES / turns and any(
                node.stepped for node in self.nodes.values()
            ):
                self.leave_request()  # of a client that asks for something else
                self.arrive()
            match self.chance.randrange(350 if self.is_calm else 35):
                case 0:
                    self.arrive()
                case 1 if not self.is_calm or self.chance.random() < 0.3:
                    self.leave_request()
                case 2 if not self.is_calm or self.chance.random() < 0.3:
                    self.break_connection(*self.chance.sample(NAMES, 2))
                case 3 if self.chance.random() < 0.3:
                    self._lose_one()
                case _:
                    self.go_on()
        for turn in range(MOST_TURNS):
            if turn % 20 == 0 and self._is_over:
                break
            self.go_on()
        else:
            raise Broken(Rule.END, f"{len(self.ledger)} requests have not ended")
        self._check_end()

    @property
    def _is_over(self) -> bool:
        alive = [node for name, node in self.nodes.items() if name not in self.dead]
        return not (
            len(self.ledger)
            or self.to_routers
            or any(self.to_sources.values())
            or any(self.to_takers.values())
            or any(node.inbox or node.calls or node.events or node.running or node.queue for node in alive)
            or not all(node.exchange.is_idle for node in alive)
            or any(node.heir is not None and node.heir.has_events for node in alive)
        )

    def _check_once(self) -> None:
        for name, node in self.nodes.items():
            if name in self.dead:
                continue
            ends = {
                number for message in node.inbox if isinstance(message, Abort) for number in message.requests
            }
            told = {
                delta.request
                for sender, message in self.to_routers
                if sender == name
                for delta in getattr(message, "deltas", ())
                if delta.finish_reason is not None
            }
            for request in [*node.running, *node.queue, *node.exchange.waiting.requests]:
                number = request.key[1]
                if self.ledger.find(name, number) is None and number not in ends | told:
                    raise Broken(Rule.ONCE, f"{name} runs {request!r}, which is not its any more")

    def _check_end(self) -> None:
        for entry in self.entries:
            tokens = list(entry.prompt.prompt_ids)
            for token in entry.emitted:
                if token != next_token(tokens):
                    raise Broken(Rule.ANSWER, f"request {entry.prompt.request_id}")
                tokens.append(token)
            if len(entry.emitted) != entry.prompt.params.max_tokens:
                raise Broken(Rule.ANSWER, f"request {entry.prompt.request_id}: {len(entry.emitted)} tokens")
        for name, node in self.nodes.items():
            if name in self.dead:
                continue
            if node.pool.num_used or node.lender or node.fetcher or not node.exchange.is_idle:
                raise Broken(Rule.END, f"{name}: {node.exchange!r}, {node.pool!r}")
            counters = node.exchange.counters()
            self.seen.update(counters.outcomes)
            self.seen["fetched"] += counters.fetched_tokens
