"""The choice in columns, compared with the rule for one candidate after the other."""

from __future__ import annotations

import random
from collections import Counter as Tally

import msgspec
import pytest

from coordinator.messages import Load, Member, State, View
from engine.messages import BlockEvents, Capacity, Counters, InstanceReport
from engine.pieces.pool import NAME_BYTES, prefix_names
from engine.sampling import SamplingParams
from router.dispatch import chooser as choosing
from router.dispatch.chooser import Chooser
from router.dispatch.homes import Homes
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.policy import Policy, affinity
from router.dispatch.pool import Pool, PooledInstance
from router.mesh import MeshError, Prompt
from tests.coordinator.membership.test_registry import lines_of

CAPACITY = Capacity(16, 200, 8, 2048, 4)
PREFIXES = [[number] * 16 * length for number, length in enumerate((2, 5, 40))]


class Mesh:
    """A pool of which anything may happen at random."""

    def __init__(self, seed: int, size: int, kind: Policy) -> None:
        self.rng = random.Random(seed)
        self.pool, self.now = Pool(), 1.0
        self.chooser = Chooser(self.pool, Ledger(), kind)
        self._members = {f"i{rank}": self._member(f"i{rank}", rank) for rank in range(size)}
        self._numbers = dict.fromkeys(self._members, 0)
        self._steps = 0
        self._at_once = self.rng.choice((None, 1.5, 4.0))
        self._see()

    def _member(self, name: str, rank: int) -> Member:
        state = State.READY if self.rng.random() < 0.95 else State.DRAINING
        stalled = 20.0 if self.rng.random() < 0.02 else 0.0
        return Member(
            instance=name, rank=rank, state=state, phase="", address="a", host=f"h{rank // 4}", pid=1,
            load=Load(stalled_for=stalled),
        )  # fmt: skip

    def _see(self) -> None:
        members = sorted(self._members.values(), key=lambda member: member.rank)
        size = len(members)
        self.pool.apply(View(epoch=1, size=size, settings=None, members=members, waiting_for=""), self.now)
        for instance in self.pool:
            if not instance.attached and self.rng.random() < 0.9:
                instance.attached = True
                instance.capacity = msgspec.structs.replace(
                    CAPACITY,
                    num_blocks=self.rng.choice((200, 200, 150)),
                    max_num_queued_tokens=self.rng.choice((None, 2000)),
                    at_once=self._at_once,
                    blocks_at=self.rng.choice(("", "tcp://a", "tcp://b")),
                    cache_identity=self.rng.choice(("a", "a", "b")),
                )

    def happens(self) -> None:
        """Something of what changes a choice."""
        self.now += self.rng.choice((0.0, 0.01, 0.3))
        instance = self.rng.choice(list(self.pool))
        match self.rng.randrange(12):
            case 0:
                rank, name = instance.rank, f"{instance.name}'"
                del self._members[instance.name]
                self.pool.index.forget(instance.name)
                self._members[name] = self._member(name, rank)
                self._numbers[name] = 0
                self._see()
            case 1:
                self._members[instance.name] = self._member(instance.name, instance.rank)
                self._see()
            case 2:
                instance.lost(self.now)
                self.pool.index.forget(instance.name)
                self._numbers[instance.name] = 0
                instance.attached = self.rng.random() < 0.8
            case 3:
                instance.breaker.proved()
            case 4 | 5 | 6:
                self._holds(instance)
            case _:
                self._reports(instance)

    def _reports(self, instance: PooledInstance) -> None:
        self._steps += 1
        busy = self.rng.random() < 0.4
        waiting = self.rng.randrange(6) if busy else 0
        instance.take_report(
            InstanceReport(
                instance.last_dispatch, self.rng.randrange(9) if busy else 0, waiting, 100 * waiting,
                self.rng.choice((0, 50, 190)), 200, Counters(steps=self._steps), uncached_tokens=70 * waiting,
                queued=self.rng.randrange(3) if busy else 0,
                fetch_price=self.rng.choice((0.03, 0.25, 0.6, 0.61, 1.0)),
            ),
            self.now,
        )  # fmt: skip

    def _holds(self, instance: PooledInstance) -> None:
        names = prefix_names(self.rng.choice(PREFIXES), 16, "")
        stored = b"".join(name.to_bytes(NAME_BYTES, "big") for name in names)
        number, self._numbers[instance.name] = self._numbers[instance.name], self._numbers[instance.name] + 1
        self.pool.index.apply(instance.name, BlockEvents(number, number + 1, reset=not number, stored=stored))

    def request(self) -> Entry:
        prompt = self.rng.choice(([], *PREFIXES)) + [99] * self.rng.choice((5, 100, 900))
        session = f"s{self.rng.randrange(20)}" if self.rng.random() < 0.3 else ""
        return Entry(
            Prompt(
                request_id=f"r{self.rng.randrange(1000)}", prompt_ids=prompt, params=SamplingParams(), seed=1,
                asked=self.rng.choice((0, 0, 10)), session=session,
            )
        )  # fmt: skip

    def choices(self, monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, str | None]:
        """The instance by the rule, and in columns (None: left to the rule)."""
        entry, chooser = self.request(), self.chooser
        turn, wish, blocks = chooser._turn, chooser._wish(entry), chooser._blocks_of(entry)
        found = chooser._columns().choose(chooser._policy, entry, blocks, wish, self.now)
        with monkeypatch.context() as patched:
            patched.setattr(choosing, "MANY", 10**9)
            try:
                ruled = chooser.choose(entry, self.now)
            except MeshError:
                assert found is None
                return None, None
        assert chooser._turn == turn + 1
        if self.rng.random() < 0.8:
            chooser.dispatch(entry, ruled, self.now)
        return ruled.name, found.name if found is not None else None


@pytest.mark.parametrize("kind", Policy)
@pytest.mark.parametrize("seed", range(3))
def test_columns_choose_what_the_rule_chooses(
    kind: Policy, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(Mesh(seed, 40, kind), 250, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(40))
def test_columns_choose_what_the_rule_chooses_at_night(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Mesh(seed, 100, Policy.PREFIX_AWARE), 2000, monkeypatch)


def compare(mesh: Mesh, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Tally[str]()
    for _ in range(count):
        for _ in range(mesh.rng.randrange(4)):
            mesh.happens()
        ruled, chosen = mesh.choices(monkeypatch)
        if chosen is not None:
            assert chosen == ruled
        found["columns" if chosen is not None else "refused" if ruled is None else "rule"] += 1
    leaves_to_the_rule = mesh.chooser._policy in (Policy.POWER_OF_TWO, Policy.CONSISTENT_HASH)
    assert found["rule"] < count * 0.1 or leaves_to_the_rule, found


def test_homes_are_those_of_all_instances() -> None:
    homes, rng = Homes(), random.Random(1)
    ranks = set(range(30))
    for _ in range(2000):
        if rng.random() < 0.3:
            rank = rng.randrange(60)
            if rank in ranks and len(ranks) > 10:
                ranks.discard(rank)
            elif rank not in ranks:
                ranks.add(rank)
                homes.joined(rank)
        key = f"s{rng.randrange(5)}"
        first = next((rank for rank in homes.of(key, ranks) if rank in ranks), None)
        if first is None:
            homes.forget(key)
            first = homes.of(key, ranks)[0]
        assert first == min(ranks, key=lambda rank: (affinity(key, rank), rank))


def test_a_choice_costs_the_same_in_any_mesh() -> None:
    def lines(size: int) -> int:
        mesh = Mesh(1, size, Policy.PREFIX_AWARE)
        for _ in range(500):
            mesh.happens()
        entry = mesh.request()
        mesh.chooser.choose(entry, mesh.now)  # names the blocks, and makes the rows
        return lines_of(lambda: mesh.chooser.choose(entry, mesh.now))

    assert lines(1024) < 4 * lines(64) < 4000  # of 16 times as many
