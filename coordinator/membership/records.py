"""An instance's record, and the instructions that the coordinator's rules return (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, ItemsView, Iterator, Mapping, Set, ValuesView
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

import msgspec

from coordinator.membership.progress import Progress
from coordinator.messages import (
    AdaptersReport,
    ExpertLoads,
    FromCoordinator,
    GroupPlan,
    Heartbeat,
    Load,
    Member,
    OrdersReport,
    PlanChange,
    PlanName,
    Role,
    Settings,
    State,
    View,
    ViewChange,
    WeightsReport,
    WeightVersion,
)
from coordinator.messages import Peer as GroupPeer
from coordinator.numerics import Numerics

T = TypeVar("T")

MEMBER_STATES = (State.LOADED, State.READY, State.DRAINING)
"""States of instances that have their weights, and may be in a group."""
Peer = bytes
"""The listener's name for a connection."""
MAX_NAMERS = 1000
"""Routers whose shadow checks are counted for one instance."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the coordinator's rules, fixed at its start; times in seconds."""

    name: str = ""
    token: str = ""
    """Random; another one in every coordinator process."""
    size: int | None = None
    """``-dp``; None until the first instance brings one."""
    reserved: tuple[int, ...] = ()
    """Ranks that the head's own instances will take; "any" never gets one of them."""
    settings: Settings | None = None
    require_same_numerics: bool = False
    """Refuse an instance whose numerics class is not that of the mesh."""
    heartbeat_interval: float = 0.5
    """Seconds between two heartbeats of an instance."""
    most_heartbeats: float = 2048.0
    """Heartbeats of all instances together each second; those of a larger mesh come less often."""
    member_timeout: float = 5.0
    """Seconds of silence after which an instance that has loaded is removed."""
    loading_timeout: float = 30.0
    """Seconds of silence after which an instance that loads is removed.

    Loading may hold the interpreter for long.
    """
    watcher_timeout: float = 10.0
    """Seconds of silence after which a watcher gets no more views."""
    probe_grace: float = 0.3
    """Seconds without an answer after which an instance reported as lost is removed."""
    quiet_grace: float = 1.0
    """Seconds without an answer for members of a broken group that no other accuses."""
    return_grace: float = 2.0
    """Seconds for an instance reported as lost to register with a restarted coordinator."""
    view_grace: float = 1.5
    """Seconds after its start for which a coordinator calls its views incomplete.

    While fewer than ``size`` instances serve: ``member_timeout``. By then live ones have registered again.
    """
    forming_timeout: float = 60.0
    """Seconds after which a group that has not begun is replaced by the next."""
    reach_tries: int = 3
    """Failed groups of the same live members in a row before a reachability check.

    Each member is then asked which others it reaches.
    """
    reach_timeout: float = 4.0
    """Seconds for the answers to a reachability check."""
    reach_interval: float = 5.0
    """Seconds between two checks whether an instance that was left out is reached again."""
    reach_patience: float = 3600.0
    """Most seconds until the first of these checks.

    The time doubles whenever the instance is left out.
    """
    steady_after: float = 300.0
    """Seconds of stepping after which a group counts as good: earlier attempts do not count."""


class Send(msgspec.Struct, frozen=True):
    """Instruction: send this message to this peer."""

    peer: Peer
    message: FromCoordinator


class Note(msgspec.Struct, frozen=True):
    """Instruction: log this line."""

    text: str
    warning: bool = False


class Publish(msgspec.Struct, frozen=True):
    """Instruction: send this message, encoded once, to all of these watchers or instances."""

    peers: tuple[Peer, ...]
    message: View | ViewChange | GroupPlan | PlanChange


Instruction = Send | Publish | Note


@dataclass
class Record:
    """What is known of one instance."""

    instance: str
    rank: int
    peer: Peer
    host: str
    pid: int
    heard_at: float
    state: State = State.LOADING
    phase: str = "starting"
    address: str = ""
    store: str = ""
    load: Load = field(default_factory=Load)
    experts: tuple[tuple[int, ...], ...] = ()
    experts_by_layer: tuple[tuple[tuple[int, ...], ...], ...] = ()
    expert_layers: int = 0
    loads: ExpertLoads | None = None
    expert_bytes: int = 0
    max_experts: int = 0
    epoch: int = 0
    """Epoch of the group that it steps in."""
    ready_epoch: int = 0
    plan: PlanName | None = None
    """The newest plan that it has, as it says."""
    planned: tuple[int, float] = (0, 0.0)
    """Epoch of the newest plan that was sent to it, and when."""
    numerics: Numerics | None = None
    role: Role = Role.MIXED
    is_role_set: bool = False
    orders: OrdersReport = field(default_factory=OrdersReport)
    """How far it is with the standing orders."""
    follows_orders: bool = False
    """Whether the newest orders were in effect there at some time since it is ready."""
    weights: WeightsReport = field(default_factory=WeightsReport)
    """How far it is with weight versions."""
    adapters: AdaptersReport = field(default_factory=AdaptersReport)
    """How far it is with an adapter to read."""
    odd: dict[str, int] = field(default_factory=dict)
    """Shadow checks that name it, by router."""
    registered_at: float = 0.0
    contested_at: float | None = None
    """When another instance, perhaps gone since, asked for this rank; None once settled."""

    def hear(self, peer: Peer, message: Heartbeat, now: float) -> bool:
        """Take over the contents of a heartbeat; returns whether watchers need to know."""
        before = (self.state, self.phase, self.address, self.numerics, self.role, self.orders)
        self.peer, self.heard_at, self.load = peer, now, message.load
        self.state, self.phase, self.address = message.state, message.phase, message.address
        self.store = message.store
        self.experts, self.max_experts = message.experts, message.max_experts
        self.experts_by_layer, self.loads = message.experts_by_layer, message.loads
        self.expert_layers, self.expert_bytes = message.expert_layers, message.expert_bytes
        self.epoch, self.ready_epoch, self.plan = message.epoch, message.ready_epoch, message.plan
        self.numerics = message.numerics or self.numerics
        self.role, self.is_role_set, self.orders = message.role, message.is_role_set, message.orders
        self.weights, self.adapters = message.weights, message.adapters
        return (self.state, self.phase, self.address, self.numerics, self.role, self.orders) != before

    def member(self) -> Member:
        """As watchers see it."""
        return Member(
            instance=self.instance,
            rank=self.rank,
            state=self.state,
            phase=self.phase,
            address=self.address,
            host=self.host,
            pid=self.pid,
            load=self.load,
            numerics=self.numerics,
            odd=sum(self.odd.values()),
            role=self.role,
        )

    def hear_odd(self, router: str, count: int) -> bool:
        """Take over how many shadow checks of a router name it; False if known."""
        if self.odd.get(router, 0) >= count or (router not in self.odd and len(self.odd) == MAX_NAMERS):
            return False
        self.odd[router] = count
        return True

    def held(self, rank: int, layer: int) -> tuple[int, ...]:
        """The experts of a layer that one of its tensor-parallel ranks holds."""
        if rank < len(self.experts_by_layer):
            return self.experts_by_layer[rank][layer]
        return self.experts[rank] if rank < len(self.experts) else ()

    def group_peer(self) -> GroupPeer:
        """As the members of its group see it."""
        return GroupPeer(self.rank, self.address, self.host, self.instance)


class Records(Mapping[int, Record]):
    """The instances that are here, by rank.

    There may be thousands, and each is looked up by its name several times a second.
    """

    def __init__(self) -> None:
        self._by_rank: dict[int, Record] = {}
        self._by_name: dict[str, Record] = {}
        self._on_host: Counter[str] = Counter()
        self._classes: Counter[Numerics] = Counter()
        self._lowest = 0
        """No rank below this one is free."""
        self._loaded: dict[str, int] = {}
        """The most experts that each loaded one has room for."""
        self.num_room_changes = 0
        """How often these numbers have changed."""
        self._sorted: list[Record] | None = []
        """The loaded ones by rank; None: to be made again."""
        self.progress = Progress()
        """The newest group's."""
        self._weights = WeightVersion()
        """The version that the next group steps with."""
        self._lacking: set[str] = set()
        """Loaded instances that neither use nor have prepared it."""
        self._with_weights: list[Record] | None = None
        """The other loaded ones by rank; None: to be made again."""

    def __repr__(self) -> str:
        return f"<Records of ranks {sorted(self)}>"

    def __getitem__(self, rank: int) -> Record:
        return self._by_rank[rank]

    def __contains__(self, rank: object) -> bool:
        return rank in self._by_rank  # without this, asking for one that is away raises an exception inside

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_rank)

    def __len__(self) -> int:
        return len(self._by_rank)

    def values(self) -> ValuesView[Record]:
        return self._by_rank.values()

    def items(self) -> ItemsView[int, Record]:
        return self._by_rank.items()

    def named(self, instance: str) -> Record | None:
        return self._by_name.get(instance)

    def num_on_host(self, host: str) -> int:
        return self._on_host[host]

    def add(self, record: Record) -> None:
        assert record.rank not in self._by_rank
        assert record.instance not in self._by_name
        self._by_rank[record.rank] = self._by_name[record.instance] = record
        self._on_host[record.host] += 1
        self.count_class(record, None)
        self.heard(record)

    def heard(self, record: Record) -> None:
        """Note what has changed in a record that is here."""
        is_loaded = record.state in MEMBER_STATES and bool(record.address)
        self._note(record.instance, record.max_experts if is_loaded else None)
        lacks = is_loaded and self._lacks_weights(record)
        if lacks != (record.instance in self._lacking):
            self._lacking ^= {record.instance}
            self._with_weights = None
        self.progress.heard(record)

    def loaded(self) -> list[Record]:
        """The instances that have their weights and are not leaving, by rank."""
        if self._sorted is None:
            found = (self._by_name[name] for name in self._loaded)
            self._sorted = sorted(found, key=attrgetter("rank"))
        return self._sorted

    @property
    def num_loaded(self) -> int:
        """Number of these."""
        return len(self._loaded)

    # ---- weight versions

    def follow_weights(self, version: WeightVersion) -> None:
        """Ask which instances have this version, from now on."""
        if (version.number, version.update) == (self._weights.number, self._weights.update):
            return
        self._weights, self._with_weights = version, None
        self._lacking = {name for name in self._loaded if self._lacks_weights(self._by_name[name])}

    @property
    def lacking_weights(self) -> Set[str]:
        """Loaded instances that neither use that version nor have prepared it."""
        return self._lacking

    def with_weights(self) -> list[Record]:
        """The loaded instances that have that version, by rank.

        The same list is returned as long as they do not change.
        """
        loaded = self.loaded()
        if not self._lacking:
            return loaded
        if self._with_weights is None:
            self._with_weights = [each for each in loaded if each.instance not in self._lacking]
        return self._with_weights

    def _lacks_weights(self, record: Record) -> bool:
        version, theirs = self._weights, record.weights
        return version.number > theirs.number and version.update != theirs.prepared

    def _note(self, name: str, room: int | None) -> None:
        """``room``: for experts, of a loaded instance; None: it is not loaded."""
        before = self._loaded.get(name)
        if room == before:
            return
        self.num_room_changes += 1
        if room is None:
            del self._loaded[name]
        else:
            self._loaded[name] = room
        if room is None or before is None:
            self._sorted = self._with_weights = None

    def remove(self, record: Record) -> None:
        del self._by_rank[record.rank], self._by_name[record.instance]
        self._note(record.instance, None)
        self._lacking.discard(record.instance)
        self.progress.left(record.instance)
        _take(self._on_host, record.host)
        if record.numerics is not None:
            _take(self._classes, record.numerics)
        self._lowest = min(self._lowest, record.rank)

    def free_rank(self, reserved: Collection[int]) -> int:
        """The lowest rank that nobody has, and that is not reserved."""
        while self._lowest in self._by_rank:
            self._lowest += 1
        rank = self._lowest
        while rank in self._by_rank or rank in reserved:
            rank += 1
        return rank

    def count_class(self, record: Record, before: Numerics | None) -> None:
        """Note that a record has another numerics class than ``before``."""
        if before is not None:
            _take(self._classes, before)
        if record.numerics is not None:
            self._classes[record.numerics] += 1

    def classes(self, but: Record | None = None) -> frozenset[Numerics]:
        """Numerics classes of all instances ``but`` one."""
        own = but.numerics if but is not None else None
        return frozenset(each for each, count in self._classes.items() if count > (each == own))


def _take(counts: Counter[T], key: T) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
