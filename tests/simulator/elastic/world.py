"""The world of one schedule: coordinator, instances, groups and routers.

The coordinator may be away; instances come, go, stall and die.

A schedule is a seed. Real are :class:`coordinator.membership.registry.Registry`,
:class:`coordinator.member_state.MemberState`, :class:`engine.groups.recovery.Recovery` and
:class:`parallel.lockstep.Lockstep`. Faults happen at their time, or wait for one of the worst moments
(:meth:`World.provoke`). Read a schedule with ``python -m tests.simulator.elastic SEED``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from coordinator.membership.records import Instruction, Note, Publish, Send
from coordinator.membership.registry import Registry
from coordinator.messages import Beat, GroupPlan, PlanChange, Register, ToCoordinator, Welcome
from coordinator.messages import Settings as MeshSettings
from engine.groups.recovery import LEAVE_TIMEOUT, Prepare, Recovery, names
from parallel.lockstep import Lockstep
from tests.simulator.elastic.checker import Checker, Rule
from tests.simulator.elastic.group import End, Group
from tests.simulator.elastic.instance import Instance, Phase
from tests.simulator.elastic.settings import COORDINATOR_TICK, RULES, TICKS_PER_SECOND, Settings
from tests.simulator.schedule import Schedule, run_schedule

STEADY = 150
"""Ticks that everything must stay as it should be."""
MAX_INSTANCES = 7
PLANS = (GroupPlan, PlanChange)
REPEATED_PLANS = 0.2
"""Share of the plans that arrive twice."""

MESH_SETTINGS = MeshSettings(
    model="m", revision=None, served_model_name=("m",), fingerprint="f", dtype="float32", max_model_len=128,
    block_size=16, vocab_size=100, tensor_parallel_size=1, pipeline_parallel_size=1, enable_expert_parallel=True,
    expert_placement_strategy="linear", all2all_backend="auto", data_parallel_size=1, max_num_batched_tokens=64,
    max_num_seqs=8,
)  # fmt: skip


class Request:
    """A request, in its router's ledger."""

    def __init__(self, tokens: int, came_at: int) -> None:
        self.left = tokens
        self.came_at = came_at
        self.attempt = 0
        self.home: Instance | None = None


class Call(NamedTuple):
    """A call that happens to an instance or, with ``who`` None, to the world."""

    who: Instance | None
    in_step: bool
    """Its step thread does it, which may hang."""
    what: Callable[..., None]
    arguments: tuple[Any, ...]
    link: tuple[str, str] | None = None
    """The connection that it comes over, if it is a message."""

    def held_until(self) -> int:
        """The last tick for which the instance stands still; the call waits until then."""
        if self.who is None:
            return -1
        return max(self.who.frozen_until, self.who.hung_until if self.in_step else -1)


EVENTS_OF_A_TICK = 4
"""Events of a tick in a split that lasts: five instances, shortest deadlines."""


class World(Schedule[Call]):
    """The mesh of one schedule: its coordinator, instances, groups and requests."""

    MAX_EVENTS = 60_000
    settings: Settings
    checker: Checker
    registry_class = Registry
    recovery_class = Recovery
    lockstep_class = Lockstep
    instance_class = Instance

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.settings = Settings.draw(self.rng)
        self._bound = self.settings.bound
        self._split_bound = self.settings.split_bound
        self._steady = STEADY
        self.num_layers = 1
        self.popularity: list[list[int]] = []
        """Rows of each expert for each token, by layer."""
        if self.settings.splits:  # those who are left out are looked at as long as it lasts
            self.most_events += EVENTS_OF_A_TICK * self.settings.split
        self.checker = Checker(has_faults=self.settings.has_faults, num_experts=self.settings.num_experts)
        self.mesh_settings = msgspec.structs.replace(
            MESH_SETTINGS, data_parallel_size=self.settings.size, num_experts=self.settings.num_experts
        )
        self.instances: dict[str, Instance] = {}
        self.requests: list[Request] = []
        self.registry: Registry | None = None
        self._groups: dict[tuple[int, str], Group] = {}
        self.num_coordinators = 0
        self._last_arrival: dict[tuple[str, str], tuple[int, float]] = {}
        self._ranks: dict[int, str] = {}
        """The instance that has each rank, or had it last."""
        self._highest = 0
        self._worst: list[Callable[[Instance], None]] = []
        """Faults that wait for a worst moment."""
        self.last_fault = 0
        self.last_disturbance = 0
        """When the last fault that is no split, or another change of the mesh, happened."""
        self.split_since = self.split_until = -1_000
        self._side_a: set[str] = set()
        """The instances that data of the others does not reach while there is a split."""
        self._one_way = False
        self._vain_since = -1_000
        """Time of the first group plan since the split whose members cannot all connect."""
        self._steady_since: int | None = None
        self._plan()

    # ---- time

    def after(self, who: Instance | None, delay: int, what: Callable[..., None], *arguments: Any) -> None:
        """Let something happen to an instance (or to the world), if it still lives then."""
        self.push(delay, Call(who, False, what, arguments))

    def step_after(self, who: Instance, delay: int, what: Callable[..., None], *arguments: Any) -> None:
        """The same for what its step thread does, which may hang."""
        self.push(delay, Call(who, True, what, arguments))

    def timer(self, who: Instance | None, delay: int) -> int:
        """The ticks that pass until somebody's own clock has gone so many further."""
        return delay

    def clock(self, who: Instance | None) -> float:
        """Seconds on the clock of an instance or, with None, on that of the coordinator."""
        return self.now / TICKS_PER_SECOND

    # ---- the plan

    def _plan(self) -> None:
        settings = self.settings
        self._coordinator_begins()
        for rank in range(settings.size):
            self.after(None, self.up_to(20), self._spawn, rank)
        for _ in range(settings.arrivals):
            self.after(None, self.up_to(settings.span + 100), self._arrive)
        for count, fault in (
            (settings.kills, self._kill),
            (settings.stalls, self._stall),
            (settings.hangs, self._hang),
            (settings.cuts, self._cut),
            (settings.leaves, self._leave),
            (settings.restarts, self._restart_coordinator),
            (settings.splits, self._split),
        ):
            for _ in range(count):
                if self.chance(settings.provoked):
                    self._worst.append(fault)
                else:
                    self.after(None, 100 + self.up_to(settings.span), self._fault, fault)
        for _ in range(settings.joins):
            self.after(None, self.up_to(settings.span + 100), self._spawn, None)
        self.last_fault = 100 + settings.span
        self.after(None, COORDINATOR_TICK, self._tick)

    def reading_fails(self) -> bool:
        """Whether experts that a plan gives to an instance cannot be read now."""
        return False

    def provoke(self, point: str, instance: Instance) -> None:
        """Perhaps let a fault happen now: it is one of the worst moments."""
        if self._worst and self.now > 50 and self.chance(0.25):
            fault = self._worst.pop(self.rng.randrange(len(self._worst)))
            self.checker.counts[f"fault at {point}"] += 1
            victim = instance if self.chance(0.5) else self._anybody()
            self.after(None, self.up_to(3), self._fault, fault, victim)

    def _fault(self, fault: Callable[[Instance], None], victim: Instance | None = None) -> None:
        victim = victim if victim is not None and victim.alive else self._anybody()
        if victim is not None:
            self._disturbed(self.now)
            self._steady_since = None
            fault(victim)

    def _disturbed(self, until: int) -> None:
        self.last_fault = max(self.last_fault, until)
        self.last_disturbance = max(self.last_disturbance, until)

    def _anybody(self) -> Instance | None:
        living = [instance for instance in self.instances.values() if instance.alive]
        return self.rng.choice(living) if living else None

    def _spawn(self, rank: int | None) -> None:
        if sum(instance.alive for instance in self.instances.values()) >= MAX_INSTANCES:
            return
        number = len(self.instances)
        instance = self.instances[f"i{number}"] = self.instance_class(self, number, rank)
        self.note(instance.name, f"starts, rank {rank}")
        if self.chance(0.5):
            self._side_a.add(instance.name)
        self._disturbed(self.now)
        self._steady_since = None
        instance.say()

    def _kill(self, victim: Instance) -> None:
        self._kill_one(victim)
        other = self._anybody()
        if other is not None and self.chance(0.2):
            self.checker.counts["two deaths at once"] += 1
            self._kill_one(other)
        if self.settings.restarts and self.chance(0.2):
            self._restart_coordinator(victim)

    def _kill_one(self, victim: Instance) -> None:
        self.note(victim.name, "is killed")
        self.checker.counts["kills"] += 1
        rank = victim.member_state.welcome.rank if victim.member_state.welcome else None
        self.end(victim, End.DEAD)
        if self.chance(0.5):
            self.after(None, self.up_to(100), self._spawn, rank if self.chance(0.7) else None)

    def _stall(self, victim: Instance) -> None:
        self.note(victim.name, "is stopped")
        self.checker.counts["stalls"] += 1
        victim.frozen_until = self.now + 1 + self.up_to(self.settings.stall)
        self._disturbed(victim.frozen_until)
        victim.disturbed_at = max(victim.disturbed_at, victim.frozen_until)

    def _hang(self, victim: Instance) -> None:
        self.note(victim.name, "hangs")
        self.checker.counts["hangs"] += 1
        victim.hung_until = self.now + 1 + self.up_to(self.settings.stall)
        self._disturbed(victim.hung_until)
        victim.disturbed_at = max(victim.disturbed_at, victim.hung_until)

    def _cut(self, victim: Instance) -> None:
        self.note(victim.name, "has no connection to the coordinator")
        self.checker.counts["cuts"] += 1
        victim.cut_until = self.now + 1 + self.up_to(self.settings.stall)
        self._disturbed(victim.cut_until)
        victim.disturbed_at = max(victim.disturbed_at, victim.cut_until)

    def _split(self, _: Instance) -> None:
        """Cut data between some instances and the others, or in one direction only."""
        if self.now <= self.split_until:
            return
        self.checker.counts["splits"] += 1
        self._side_a = {name for name in self.instances if self.chance(0.5)}
        self._one_way = self.chance(0.2)
        self.split_since, self.split_until = self.now, self.now + 1 + self.up_to(self.settings.split)
        self.last_fault = max(self.last_fault, self.split_until)
        self.note(
            "world", f"no data {'to' if self._one_way else 'between'} {sorted(self._side_a)} and others"
        )
        for _ in range(3):
            self.after(None, self.up_to(self.split_until - self.now), self._arrive)

    def passes(self, sender: str, receiver: str) -> bool:
        """Whether data of one instance reaches another."""
        if self.now > self.split_until or (sender in self._side_a) == (receiver in self._side_a):
            return True
        return self._one_way and sender in self._side_a

    def passes_between(self, one: str, other: str) -> bool:
        """Whether data passes between two instances, both ways."""
        return self.passes(one, other) and self.passes(other, one)

    def is_mute(self, instance: Instance) -> bool:
        """Whether nothing of an instance comes to the coordinator."""
        return self.now <= instance.cut_until

    def is_deaf(self, instance: Instance) -> bool:
        """Whether nothing of the coordinator comes to an instance."""
        return self.now <= instance.cut_until

    def _leave(self, victim: Instance) -> None:
        self.note(victim.name, "gets SIGTERM")
        victim.drain()

    def _restart_coordinator(self, _: Instance) -> None:
        if self.registry is not None:
            self.note("coordinator", "is killed")
            self.checker.counts["restarts"] += 1
            self.registry = None
            absence = 1 + self.up_to(self.settings.absence)
            self._disturbed(self.now + absence)
            self.after(None, absence, self._coordinator_begins)

    # ---- the coordinator

    def _coordinator_begins(self) -> None:
        self.num_coordinators += 1
        rules = msgspec.structs.replace(RULES, size=self.settings.size, token=str(self.num_coordinators))
        self.registry = self.registry_class(rules)
        self._highest = 0
        self.note("coordinator", f"starts, number {self.num_coordinators}")

    def to_coordinator(self, instance: Instance, message: ToCoordinator) -> None:
        if self.registry is not None and not self.is_mute(instance):
            arguments = (self.num_coordinators, instance.name, message)
            self._send((instance.name, "to"), None, self._coordinator_hears, arguments)

    def _send(
        self,
        link: tuple[str, str],
        who: Instance | None,
        what: Callable[..., None],
        arguments: tuple[Any, ...],
        lag: int = 0,
    ) -> None:
        """Send a message over a connection, which keeps the order, in ``lag`` ticks or more."""
        when, order = self.now + lag + self.up_to(self.settings.wire), self.rng.random()
        last, last_order = self._last_arrival.get(link, (-1, 0.0))
        if when <= last:
            when, order = last, last_order + (1 - last_order) * order
        self._last_arrival[link] = (when, order)
        self._push_at(when, order, Call(who, False, what, arguments, link))

    def _hold(self, link: tuple[str, str], message: Call, when: int) -> None:
        """Let a message wait for a stopped instance, in the order of its connection."""
        order = self.rng.random()
        last, last_order = self._last_arrival[link]
        if (when, order) <= (last, last_order):
            when, order = last, last_order + (1 - last_order) * order
        self._last_arrival[link] = (when, order)
        self._push_at(when, order, message)

    def _coordinator_hears(self, number: int, name: str, message: ToCoordinator) -> None:
        if self.registry is not None and number == self.num_coordinators:
            if isinstance(message, Register):
                self.instances[name].registers_again(self.num_coordinators, self._highest)
            self._highest = max(self._highest, getattr(message, "epoch", 0))
            self._carry_out(self.registry.handle(name.encode(), message, self.arrival_time(name)), name)

    def arrival_time(self, sender: str) -> float:
        """When a message came, as the coordinator takes it."""
        return self.clock(None)

    def _tick(self) -> None:
        if self.registry is not None:
            self._carry_out(self.registry.tick(self.clock(None)))
        self._rescue()
        self._look_whether_steady()
        self._look_whether_somebody_serves()
        self.after(None, self.timer(None, COORDINATOR_TICK), self._tick)

    def _carry_out(self, instructions: list[Instruction], sender: str = "") -> None:
        sends = list(_one_by_one(instructions))
        for instruction in sends:
            if isinstance(instruction, Note):
                self.note("coordinator", instruction.text)
                _, rank, what, *_ = instruction.text.split()  # "instance 3 registered ..."
                if what == "registered":
                    self._ranks[int(rank)] = sender
                elif what == "taken":
                    self._taken_out(int(rank))
                elif " is left out: " in instruction.text:
                    self._left_out(int(rank))
                continue
            message = instruction.message
            if isinstance(message, PLANS) and message.epoch > self._highest:
                assert self.registry is not None
                form = self.registry._groups.epochs.form
                assert form is not None
                self.checker.formed(form, self._highest)
                self._look_whether_it_is_tried_in_vain(form)
                self._highest = form.epoch
                for name in (*names(form), *form.leavers):
                    self.instances[name].taken_out = None  # back: the others do not go on without it
            instance = self.instances[instruction.peer.decode()]
            if not instance.alive or self.is_deaf(instance):
                continue
            if not isinstance(message, Beat):
                self.note(f"coordinator to {instance.name}", message)
            for _ in range(1 + (isinstance(message, PLANS) and self.chance(REPEATED_PLANS))):
                self._send((instance.name, "from"), instance, instance.hear, (message,))
        if any(isinstance(item, Send) and isinstance(item.message, PLANS) for item in sends):
            somebody = self._anybody()
            if somebody is not None:
                self.provoke("form", somebody)

    def _taken_out(self, rank: int) -> None:
        """Note that the coordinator has taken an instance out."""
        instance = self.instances[self._ranks[rank]]
        since = self.now - instance.disturbed_at
        suspicious = instance.disturbed_at >= 0 and since < 3 * RULES.member_timeout * TICKS_PER_SECOND
        suspicious |= self._is_split_of_late()  # wakes and rows do not come to it
        self.checker.taken_out(instance, suspicious=suspicious)
        instance.taken_out = (self.num_coordinators, self._highest)
        self.move_requests(instance)

    def _left_out(self, rank: int) -> None:
        """Note that the coordinator leaves an instance out, as others do not reach it."""
        instance = self.instances[self._ranks[rank]]
        self.checker.left_out(instance, split=self.may_be_left_out(instance))
        instance.taken_out = (self.num_coordinators, self._highest)
        self.move_requests(instance)

    def may_be_left_out(self, instance: Instance) -> bool:
        """Whether there was a reason of late to leave an instance out."""
        return self._is_split_of_late()

    def _is_split_of_late(self) -> bool:
        return self.split_until > 0 and self.now - self.split_until < self._split_bound

    # ---- instances

    def group_of(self, form: GroupPlan) -> Group:
        key = (form.epoch, form.token)
        if key not in self._groups:
            self._groups[key] = Group(self, form)
        return self._groups[key]

    def close_groups_of(self, instance: Instance, epoch: int | None, how: End = End.CLOSED) -> None:
        """Close an instance's ends of one epoch's groups, or of all."""
        for group in list(self._groups.values()):
            if instance.name in group.members and epoch in (None, group.form.epoch):
                group.close(instance, how)

    def leave(self, instance: Instance) -> None:
        """An instance ends in good order."""
        waited = self.now - (self.now if instance.drained_at is None else instance.drained_at)
        self.checker.left(instance, in_vain=waited >= LEAVE_TIMEOUT * TICKS_PER_SECOND)
        self.note(instance.name, "leaves")
        self.to_coordinator(instance, instance.leave_message())
        self.end(instance)

    def end(self, instance: Instance, how: End = End.CLOSED) -> None:
        """End a process."""
        if instance.alive:
            instance.alive = False
            if how is not End.DEAD:
                instance.phase = Phase.ENDED
            self.close_groups_of(instance, None, how)
            self.after(None, 1 + self.up_to(5), self.move_requests, instance)

    # ---- routers

    def _arrive(self) -> None:
        request = Request(1 + self.up_to(self.rng.choice((2, 20))), self.now)
        self.requests.append(request)
        self._place(request)

    def _place(self, request: Request) -> None:
        """Send a request to an instance; if there is none, try again later."""
        able = [
            instance
            for instance in self.instances.values()
            if instance.serves and instance is not request.home
        ]
        request.attempt += 1
        if not able:
            request.home = None
            self.after(None, 20, self._try_again, request, request.attempt)
            return
        request.home = self.rng.choice(able)
        self.step_after(request.home, self.up_to(2), request.home.accept, request, request.attempt)

    def _try_again(self, request: Request, attempt: int) -> None:
        if request.left and request.attempt == attempt:
            self._place(request)

    def refuse(self, request: Request, attempt: int) -> None:
        """An instance does not take a request."""
        self.after(None, 1, self._try_again, request, attempt)

    def move_requests(self, instance: Instance) -> None:
        """The requests of a lost instance go on elsewhere."""
        for request in self.requests:
            if request.left and request.home is instance:
                self.checker.counts["requests moved"] += 1
                self._place(request)

    # ---- the end

    def _rescue(self) -> None:
        """Start an instance, as a supervisor would, if too few live after the plan."""
        if self.now < self.last_fault + 50 or self.registry is None:
            return
        living = [
            instance for instance in self.instances.values() if instance.alive and not instance.draining
        ]
        room = sum(instance.room or self.settings.num_experts for instance in living)
        started = self.registry.view().epoch > 0
        if room < self.settings.num_experts or (not started and len(living) < self.settings.size):
            self.checker.counts["rescues"] += 1
            self._spawn(None)

    @property
    def is_steady(self) -> bool:
        """Whether all that live sleep in the newest group, and no work is left."""
        living = [instance for instance in self.instances.values() if instance.alive]
        if any(request.left for request in self.requests) or not living:
            return False
        groups = {instance.recovery.epoch for instance in living}
        return (
            len(groups) == 1
            and 0 not in groups
            and all(instance.phase is Phase.ASLEEP for instance in living)
            and all(instance.recovery.target is None for instance in living)
            and len(living[0].recovery.current.peers) == len(living)  # type: ignore[union-attr]
        )

    def _look_whether_steady(self) -> None:
        if not self.is_steady or self.registry is None or self.now < self.last_fault:
            self._steady_since = None
        elif self._steady_since is None:
            self._steady_since = self.now

    @property
    def _split_is_old(self) -> bool:
        """Whether a split outlasts the time to leave some out, and nothing else happened."""
        since = max(self.split_since, self.last_disturbance)
        return since + self._split_bound < self.now <= self.split_until

    def _look_whether_it_is_tried_in_vain(self, form: GroupPlan) -> None:
        """Check that groups with members that cannot connect are not formed for long.

        A split is noticed by work, so the time counts from the first such group after it.
        """
        members = names(form)
        if all(self.passes_between(one, other) for one in members for other in members):
            return
        since = max(self.split_since, self.last_disturbance)
        self._vain_since = self._vain_since if self._vain_since > since else self.now
        late = self.now - self._vain_since > self._split_bound
        if late and self._split_is_old and self.some_fit():
            self.checker.broken(Rule.SERVES, f"{members} are to form epoch {form.epoch}")

    def _look_whether_somebody_serves(self) -> None:
        """Check that requests are served in a split that lasts."""
        since, bound = max(self.split_since, self.last_disturbance), self._split_bound
        if not self._split_is_old or self.registry is None:
            return
        self.checker.counts["looks at a split that lasts"] += 1
        undone = [request for request in self.requests if request.left and request.came_at + bound < self.now]
        if undone and self.registry.view().epoch and self.some_fit():
            self.checker.broken(Rule.SERVES, f"{len(undone)} requests wait since {since}")

    def some_fit(self) -> bool:
        """Whether some instances that all reach each other hold all experts."""
        return any(map(self._has_room, (True, False)))

    def _has_room(self, side_a: bool) -> bool:
        """Whether the instances on one side of a split hold all experts."""
        members = [
            instance
            for instance in self.instances.values()
            if instance.alive and not instance.draining and (instance.name in self._side_a) == side_a
        ]
        return self.holds_all(members)

    def holds_all(self, members: Iterable[Instance]) -> bool:
        """Whether these instances have room for all experts."""
        experts = self.settings.num_experts
        return sum(instance.room or experts for instance in members) >= experts

    def happen(self, event: Call) -> None:
        """Let a call happen if its instance lives and runs; see what holds after it."""
        if event.who is not None and not event.who.alive:
            return
        until = event.held_until()
        if self.now <= until:
            if event.link is not None:
                self._hold(event.link, event, until + 1)
            else:
                self.push(until + 1 - self.now, event)
            return
        event.what(*event.arguments)
        self.is_over = self._steady_since is not None and self.now - self._steady_since >= self._steady
        if self.is_over:
            self.ends()
        if not self.is_over and self.now > self.last_fault + self._bound:
            self.checker.broken(Rule.RECOVERS, f"{self.now - self.last_fault} ticks after the last fault")

    def ends(self) -> None:
        """Called when all has been steady for long enough."""

    def state(self) -> Iterable[object]:
        return [self.registry, *self.instances.values()]

    def line(self, time: int, who: object, what: object) -> str:
        return f"{time:6d}  {who}: {_shown(what)}"


def simulate(seed: int) -> World:
    """Run the schedule of a seed; see :func:`tests.simulator.schedule.run_schedule`."""
    return run_schedule(seed, World(seed))


def _one_by_one(instructions: Iterable[Instruction]) -> Iterator[Send | Note]:
    """Messages to several instances as one for each."""
    for instruction in instructions:
        if isinstance(instruction, Publish):
            yield from (Send(peer, instruction.message) for peer in instruction.peers)
        else:
            yield instruction


def _shown(what: object) -> str:
    if isinstance(what, GroupPlan):
        return f"GroupPlan({what.epoch} of {'+'.join(names(what))}, leavers {what.leavers}, broken {what.broken})"
    if isinstance(what, Prepare):
        return f"Prepare({what.form.epoch})"
    if isinstance(what, Welcome):
        return f"Welcome(rank {what.rank}, epoch {what.epoch}{', fenced' * what.fenced})"
    return str(what)
