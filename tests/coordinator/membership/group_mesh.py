"""A registry whose instances step in groups, driven by single messages of theirs."""

from __future__ import annotations

import msgspec

from coordinator.membership.records import Instruction, Note, Rules
from coordinator.membership.registry import Registry
from coordinator.messages import (
    Balancing,
    Evidence,
    FromCoordinator,
    GroupPlan,
    Heartbeat,
    Leave,
    Load,
    Lost,
    Probe,
    Reach,
    Reached,
    State,
)
from parallel.placement import held_by_rank
from tests.coordinator.membership.test_registry import EXPERTS, register, to

SPREAD = msgspec.structs.replace(EXPERTS, num_experts=8, data_parallel_size=3)
NAMES = "abcdefgh"


class Mesh:
    """A real registry, with each instance represented by its last heartbeat."""

    def __init__(
        self,
        size: int = 3,
        room: int = 0,
        ranks: int = 1,
        balancing: Balancing | None = None,
        **rules: float,
    ) -> None:
        """``ranks``: tensor-parallel ones of each instance."""
        self.settings = msgspec.structs.replace(SPREAD, balancing=balancing)
        if ranks > 1:
            self.settings = msgspec.structs.replace(
                self.settings, data_parallel_size=size, tensor_parallel_size=ranks
            )
        self.rules = Rules(size=size, **rules)  # type: ignore[arg-type]
        self.registry = Registry(self.rules)
        self.registry.tick(0.0)
        self.now = 10.0
        self.room = room
        self.beats: dict[str, Heartbeat] = {}
        self.sent: dict[str, list[FromCoordinator]] = {}
        self.notes: list[str] = []
        self.forms: dict[str, GroupPlan] = {}
        self.cut: set[tuple[str, str]] = set()
        """Pairs of instances without a path; all reach the coordinator."""
        self.mute = ""
        """Names of instances that answer no question about reachability."""
        self.asked: list[tuple[str, str]] = []
        """Questions about reachability: instance asked, and instance asked about."""

    def begin(self, names: str = "abc") -> None:
        """Let these instances load, form the first group, and step in it."""
        for name in names:
            self.register(name)
        for name in names:
            self.says(name, state=State.LOADED)
        self.all_enter(names)

    def register(self, name: str, rank: int | None = None, **fields: object) -> FromCoordinator:
        rank = NAMES.index(name) if rank is None else rank
        before = len(self.sent.get(name, []))
        self._take(
            self.registry.handle(
                name.encode(), register(name, rank, settings=self.settings, **fields), self.now
            )
        )
        return self.sent[name][before]

    def says(self, name: str, **changes: object) -> None:
        """A heartbeat with something new, or a plain one."""
        rank = NAMES.index(name)
        beat = self.beats.get(name) or Heartbeat(
            instance=name, state=State.LOADED, phase="", address=f"tcp://a:{rank}", store=f"{name}:9{rank}",
            load=Load(), max_experts=self.room,
        )  # fmt: skip
        self.beats[name] = msgspec.structs.replace(beat, **changes)
        self._take(self.registry.handle(name.encode(), self.beats[name], self.now))

    def enters(self, name: str, state: State = State.READY) -> None:
        """Report that an instance steps in the group that it was sent last."""
        form = self.forms[name]
        place = [peer.instance for peer in form.peers].index(name)
        held = held_by_rank(form.placement, form.ranks, place)
        by_layer = tuple(tuple(map(tuple, of_rank)) for of_rank in held) if form.replicas else ()
        experts = () if form.replicas else tuple(tuple(of_rank[0]) for of_rank in held)
        self.says(
            name,
            state=state,
            epoch=form.epoch,
            ready_epoch=form.epoch,
            experts=experts,
            experts_by_layer=by_layer,
        )

    def all_enter(self, names: str, state: State = State.READY) -> None:
        for name in names:
            self.enters(name, state)

    def lost(self, name: str, epoch: int, suspects: str, evidence: Evidence = Evidence.CLOSED) -> None:
        message = Lost(instance=name, epoch=epoch, suspects=tuple(suspects), evidence=evidence)
        self._take(self.registry.handle(name.encode(), message, self.now))

    def leave(self, name: str) -> None:
        self._take(self.registry.handle(name.encode(), Leave(name), self.now))

    def answer(self, names: str) -> None:
        """Let these instances answer the last probes that they were sent."""
        for name in names:
            probes = [message for message in self.sent[name] if isinstance(message, Probe)]
            self.says(name, answers=probes[-1].number)

    def wait(self, seconds: float, alive: str = "") -> None:
        """Let time pass, with plain heartbeats of the instances ``alive``."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 0.25, until)
            for name in alive:
                self.says(name)
            self._take(self.registry.tick(self.now))

    def new_forms(self) -> list[tuple[str, GroupPlan]]:
        """The forms that were sent since the last time this was asked, repetitions left out."""
        sent = [
            (name, item) for name, items in self.sent.items() for item in items if isinstance(item, GroupPlan)
        ]
        self.sent = {
            name: [item for item in items if isinstance(item, Probe)] for name, items in self.sent.items()
        }
        return [item for number, item in enumerate(sent) if item not in sent[:number]]

    def restart_coordinator(self) -> None:
        self.registry = Registry(self.rules)

    def ranks(self) -> list[int]:
        return [member.rank for member in self.registry.view().members]

    def _take(self, instructions: list[Instruction]) -> None:
        self.notes += [item.text for item in instructions if isinstance(item, Note)]
        for name in NAMES:
            for message in to(name.encode(), instructions):
                self.sent.setdefault(name, []).append(message)
                if isinstance(message, GroupPlan):
                    self.forms[name] = message
                elif isinstance(message, Reach):
                    self._try_ways(name, message)

    def _try_ways(self, name: str, question: Reach) -> None:
        self.asked += [(name, other) for other in question.peers]
        reached = tuple(other for other in question.peers if (name, other) not in self.cut)
        if name not in self.mute:
            message = Reached(name, question.number, reached)
            self._take(self.registry.handle(name.encode(), message, self.now))

    def split(self, here: str, there: str) -> None:
        """Cut all paths between two sets of instances; all reach the coordinator."""
        self.cut |= {way for one in here for other in there for way in ((one, other), (other, one))}


def members(form: GroupPlan) -> str:
    return "".join(peer.instance for peer in form.peers)
