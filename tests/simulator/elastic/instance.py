"""A simulated process: step loop and threads around Recovery, Lockstep and MemberState."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordinator.member_state import MemberState
from coordinator.messages import (
    Evidence,
    FromCoordinator,
    GroupPlan,
    Leave,
    Load,
    Reach,
    Reached,
    Register,
    State,
    Welcome,
)
from coordinator.numerics import Numerics
from engine.groups import recovery as protocol
from engine.groups.expert_loads import LoadWindows
from engine.groups.recovery import Recovery, names
from parallel.lockstep import Lockstep, RunStep, StepHeader, Switch, Wake
from parallel.placement import held_by_rank
from tests.simulator.elastic.group import End, Group
from tests.simulator.elastic.settings import ASK_INTERVAL, PASS_ON_AFTER, RULES, TICKS_PER_SECOND

if TYPE_CHECKING:
    from tests.simulator.elastic.world import Request, World


CLASSES = [Numerics(f"fp_{kind}", kind, "float32", True) for kind in ("avx512", "avx2")]
"""Numerics classes of instances, by number in turn."""


class Phase(enum.Enum):
    LOADING = enum.auto()
    ASLEEP = enum.auto()
    WAITING = enum.auto()
    """Waiting for a group."""
    HEADERS = enum.auto()
    COMPUTING = enum.auto()
    EXPERTS = enum.auto()
    """In the collectives of the forward pass, all in one."""
    ENDED = enum.auto()


class Instance:
    """A simulated process.

    Its step thread may hang (`hung_until`), and all of it may be stopped (`frozen_until`).
    """

    def __init__(self, world: World, number: int, rank: int | None) -> None:
        self.world = world
        self.number = number
        self.name = f"i{number}"
        self.alive = True
        self.frozen_until = self.hung_until = self.cut_until = self.disturbed_at = -1_000
        self.taken_out: tuple[int, int] | None = None
        """The coordinator that took it out, and the highest epoch then.

        None again once a plan names it."""
        self.fenced_up_to = self._fenced_from_welcome = 0
        """The highest epoch that the others are known to have left without it."""
        self.phase = Phase.LOADING
        self.room = world.settings.room + 2 * world.up_to(1) if world.settings.room else 0
        self.held: set[tuple[int, int]] = set()
        """(layer, expert)"""
        balancing = world.mesh_settings.balancing
        self._windows = LoadWindows(balancing.window_size) if balancing is not None else None
        self._rows = [[0] * world.settings.num_experts for _ in range(world.num_layers)]
        """Rows computed here, by layer and expert."""
        self.requests: list[tuple[Request, int]] = []
        """Running requests: (request, attempt)."""
        self.draining = False
        self.drained_at: int | None = None
        self.recovery: Recovery = world.recovery_class(self.name)
        self.lockstep: Lockstep | None = None
        self.group: Group | None = None
        self._scheduled = 0
        self._turns = 0
        self._beats = 0
        self.member_state = MemberState(
            Register(
                instance=self.name, rank=rank, size=None, settings=world.mesh_settings, host="h", pid=number
            )
        )
        self.member_state.on_form = self._on_form
        self.member_state.on_fenced = self._on_fenced

    def __repr__(self) -> str:
        state = self.phase.name if self.alive else "dead"
        return f"<Instance {self.name} {state} {len(self.requests)} requests {self.recovery!r} {self.lockstep!r} {self.member_state!r}>"

    @property
    def is_away(self) -> bool:
        """Whether it is stopped or cut off, or was until just now.

        No coordinator can know of an instance that is away.
        """
        return self.world.now <= max(self.frozen_until, self.cut_until) + TICKS_PER_SECOND

    @property
    def num_requests(self) -> int:
        """Requests that nobody has taken from it."""
        return len(self.requests)

    @property
    def is_busy(self) -> bool:
        """Whether it has anything to do before it may leave."""
        return bool(self.requests)

    @property
    def serves(self) -> bool:
        """Whether routers choose it."""
        return self.alive and not self.draining and self.member_state.state is State.READY

    # ---- the membership's thread

    def say(self) -> None:
        """Send the coordinator this instance's state, now and after every interval."""
        if not self.alive or self.member_state.refusal is not None:
            return
        for message in self.member_state.outgoing(Load()):
            self.world.to_coordinator(self, message)
        self._beats += 1
        interval = (
            int(RULES.heartbeat_interval * TICKS_PER_SECOND) if self.member_state.welcome else ASK_INTERVAL
        )
        self.world.after(self, self.world.timer(self, interval), self._say_again, self._beats)

    def _say_again(self, beats: int) -> None:
        if beats == self._beats:
            self.say()

    def hear(self, message: FromCoordinator) -> None:
        """Take a message of the coordinator."""
        if isinstance(message, Reach):
            delay = self.world.up_to(self.world.settings.connect)
            self.world.after(self, delay, self._tells_whom_it_reaches, message)
        was_welcome = self.member_state.welcome is not None
        if isinstance(message, Welcome):
            self.fenced_up_to = self._fenced_from_welcome
        if self.member_state.take(message):
            self.say()
        if self.member_state.refusal is not None:
            self.world.end(self)
        elif self.member_state.welcome is not None and not was_welcome and self.phase is Phase.LOADING:
            self.world.after(self, self.world.up_to(self.world.settings.prepare), self._loaded)

    def _tells_whom_it_reaches(self, question: Reach) -> None:
        reached = tuple(name for name in question.peers if self.world.passes(self.name, name))
        self.world.to_coordinator(self, Reached(self.name, question.number, reached))

    def registers_again(self, coordinator: int, highest: int) -> None:
        """Its registration reaches a coordinator that has formed this many groups."""
        number, epoch = self.taken_out or (0, 0)
        if coordinator == number and highest > epoch:  # the others went on meanwhile
            self._fenced_from_welcome = epoch

    def _loaded(self) -> None:
        if self.phase is Phase.LOADING and self.member_state.state is State.LOADING:
            self.member_state.state = State.LOADED
            self.member_state.address = self.member_state.store = self.name
            self.member_state.max_experts = self.room
            self.member_state.expert_layers = self.world.num_layers if self._windows is not None else 0
            self.member_state.numerics = CLASSES[self.number % len(CLASSES)]
            self.phase = Phase.WAITING
            self.say()

    def _on_form(self, form: GroupPlan) -> None:
        self._carry_out(self.recovery.on_form(form))
        self._poke()

    def _on_fenced(self) -> None:
        self.world.checker.counts["fenced"] += 1
        self._carry_out(self.recovery.on_fenced())
        self._poke()

    # ---- the background

    def _carry_out(self, instructions: Sequence[protocol.Instruction]) -> None:
        for instruction in instructions:
            self.world.note(self.name, instruction)
            match instruction:
                case protocol.Prepare(form):
                    delay = self.world.up_to(self.world.settings.prepare)
                    self.world.after(self, delay, self._read, form)
                case protocol.Abandon(epoch):
                    self.world.close_groups_of(self, epoch)
                case protocol.AbortGroup(epoch):
                    self.world.close_groups_of(self, epoch)
                    if self.phase is Phase.ASLEEP:
                        self.phase = Phase.WAITING
                case protocol.ReportLost(lost):
                    self.member_state.report(lost)
                    self.say()
                case protocol.DropRequests():
                    self._drop_requests()
                    self.world.after(None, 1, self.world.move_requests, self)  # it refuses them
        self._tell_ready()

    def _drop_requests(self) -> None:
        self.requests.clear()

    def _read(self, form: GroupPlan) -> None:
        """The experts of a plan are here; go to its rendezvous."""
        if self.recovery.target is not form:
            return
        if not self._owned(form) <= self.held and self.world.reading_fails():
            self.world.checker.counts["reading failed"] += 1
            self._carry_out(self.recovery.failed(form.epoch))
            return
        self.held |= self._owned(form)
        self.world.provoke("read", self)
        self.world.group_of(form).join(self)

    def _owned(self, form: GroupPlan) -> set[tuple[int, int]]:
        """The experts that are its own in a group, by layer."""
        (layers,) = held_by_rank(form.placement, form.ranks, names(form).index(self.name))
        repeated = layers if form.replicas else layers * self.world.num_layers
        return {(layer, expert) for layer, experts in enumerate(repeated) for expert in experts}

    def group_formed(self, group: Group) -> None:
        """All members have come to the rendezvous."""
        self._carry_out(self.recovery.prepared(group.form.epoch))
        self.world.provoke("prepared", self)
        self._poke()

    def forming_ends(self, group: Group) -> None:
        """The time for the forming is over."""
        if not group.is_formed:
            self.forming_fails(group)

    def forming_fails(self, group: Group, suspects: Sequence[str] = ()) -> None:
        if self.recovery.target is group.form and not group.is_formed:
            self.world.checker.counts["forming failed"] += 1
            self._carry_out(self.recovery.failed(group.form.epoch, suspects))

    def sees_exit(self, epoch: int, name: str) -> None:
        """The process of a member has ended."""
        instructions = self.recovery.group_failed(epoch, [name], Evidence.EXITED)
        if instructions:
            self.world.checker.interrupted(self, f"{name} exited")
        self._carry_out(instructions)
        self._poke()

    def _tell_ready(self) -> None:
        if self.member_state.ready_epoch != self.recovery.ready_epoch:
            self.member_state.ready_epoch = self.recovery.ready_epoch
            self.say()

    # ---- the step thread

    def _poke(self) -> None:
        """Wake the loop if it sleeps."""
        if self.phase in (Phase.ASLEEP, Phase.WAITING):
            self._turns += 1
            self.world.step_after(self, 0, self._turn_of, self._turns)

    def _turn_of(self, turns: int) -> None:
        if turns == self._turns and self.phase in (Phase.ASLEEP, Phase.WAITING):
            self.loop()

    def loop(self) -> None:
        """The top of the step loop."""
        if not self.alive:
            return
        if self.draining and not self.is_busy and self.phase is not Phase.LOADING:
            self.recovery.drained(self.world.clock(self))
            if self.drained_at is None:
                self.drained_at = self.world.now
                self.member_state.state = State.DRAINED
                self.say()
                patience = self.world.timer(self, int(protocol.LEAVE_TIMEOUT * TICKS_PER_SECOND) + 1)
                self.world.step_after(self, patience, self._poke)
        turn = self.recovery.turn(self.world.clock(self))
        match turn:
            case protocol.LeaveMesh():
                self.world.leave(self)
            case protocol.Enter(form):
                self._enter(form)
                self.loop()
            case protocol.AwaitGroup():
                self.phase = Phase.WAITING
            case protocol.StepOn():
                self._begin_step()

    def _enter(self, form: GroupPlan) -> None:
        if self.group is not None:
            self.group.close(self)
        self.group = self.world.group_of(form)
        self.world.note(self.name, f"enters {form.epoch} {names(form)}")
        self.world.checker.entered(self, form, is_formed=self.group.is_formed)
        self.lockstep = self.world.lockstep_class(names(form).index(self.name), len(form.peers), form.epoch)
        if self.world.chance(0.7):
            self.held &= self._owned(form)
        self.member_state.enter(form)
        layers = range(self.world.num_layers)
        self.member_state.hold([[sorted(e for at, e in self.held if at == layer) for layer in layers]])
        if self._windows is not None:
            self._windows.entered(form.epoch, [list(rows) for rows in self._rows])
        self.member_state.ready_epoch = self.recovery.ready_epoch
        if not self.draining:
            self.member_state.state = State.READY
        self.say()
        self.world.provoke("entered", self)

    def _begin_step(self) -> None:
        assert self.lockstep is not None
        assert self.group is not None
        lockstep = self.lockstep
        if self.requests or self.recovery.switch_pending:
            wake = lockstep.wake()
            if wake is not None:
                self._send_wake(lockstep, wake)
        if not lockstep.awake:
            self.phase = Phase.ASLEEP
            return
        self.phase = Phase.HEADERS
        tokens = sum(request.left for request, attempt in self.requests if request.attempt == attempt)
        self._scheduled = min(self.world.settings.budget, max(tokens, bool(self.requests)))
        header = lockstep.header(self._scheduled, ready_epoch=self.recovery.ready_epoch)
        self.world.note(self.name, header)
        self.world.checker.header_sent(self, header)
        self.group.call(self, header)

    def _send_wake(self, lockstep: Lockstep, wake: Wake) -> None:
        if self.lockstep is not lockstep or lockstep.outstanding_wake != wake or self.group is None:
            return
        self._wake_others(wake)
        self.world.after(self, 2 + self.world.settings.delay, self._send_wake, lockstep, wake)

    def _wake_others(self, wake: Wake) -> None:
        assert self.group is not None
        for name in names(self.group.form):
            other = self.world.instances[name]
            if other is not self and self.world.passes(self.name, name) and self.world.chance(0.8):
                self.world.after(other, self.world.up_to(self.world.settings.delay), other.on_wake, wake)

    def on_wake(self, wake: Wake) -> None:
        """A peer wants a step; unless it begins soon, this instance wakes the others, too."""
        lockstep = self.lockstep
        if lockstep is not None:
            slept = not lockstep.awake
            lockstep.on_wake(wake)
            if slept and lockstep.awake:
                patience = self.world.timer(self, PASS_ON_AFTER)
                self.world.after(self, patience, self._pass_on, lockstep, wake)
            self._poke()

    def _pass_on(self, lockstep: Lockstep, wake: Wake) -> None:
        """Repeat the wake of a peer until its step begins, as :class:`engine.groups.stepping.Waker`."""
        at = (lockstep.epoch, lockstep.step)
        if self.lockstep is lockstep and self.recovery.epoch == wake.epoch and at == (wake.epoch, wake.step):
            self.world.checker.counts["wakes passed on"] += 1
            self._wake_others(wake)
            self.world.after(self, 2 + self.world.settings.delay, self._pass_on, lockstep, wake)

    def call_done(self, group: Group, rows: list[StepHeader | None]) -> None:
        """The collective that the step thread was in has ended well."""
        self.world.step_after(self, 0, self._go_on, group, rows)

    def _go_on(self, group: Group, rows: list[StepHeader | None]) -> None:
        if group is not self.group:
            return
        if self.phase is Phase.HEADERS:
            self._decide([row for row in rows if row is not None])
        elif self.phase is Phase.EXPERTS:
            self._commit()
            self.loop()

    def _decide(self, headers: list[StepHeader]) -> None:
        assert self.lockstep is not None
        decision = self.lockstep.advance(headers)
        self.world.note(self.name, decision)
        self.world.checker.decided(self, decision)
        match decision:
            case RunStep(sizes):
                if any(sizes) and self._windows is not None:
                    self._count(sum(sizes), self._windows)
                self.phase = Phase.COMPUTING
                self.world.step_after(
                    self, 1 + self.world.up_to(self.world.settings.compute), self._computed, self.group
                )
                return
            case Switch(epoch):
                self.world.provoke("switch", self)
                self._carry_out(self.recovery.switched(epoch))
                if self.recovery.broken:
                    self.world.checker.interrupted(self, f"cannot follow the others into epoch {epoch}")
        self.loop()

    def _count(self, tokens: int, windows: LoadWindows) -> None:
        """Count the rows of a step; report those of a window."""
        loads = windows.stepped(lambda: [list(rows) for rows in self._rows])
        if loads is not None:
            self.world.checker.counts["windows"] += 1
            self.member_state.loads = loads
            self.say()
        assert self.group is not None
        placement, place = self.group.form.placement, names(self.group.form).index(self.name)
        for layer, rows in enumerate(self._rows):
            for expert, ranks in enumerate(placement.copies(layer)):
                if place in ranks:
                    rows[expert] += tokens * self.world.popularity[layer][expert] // len(ranks)

    def _computed(self, group: Group) -> None:
        if self.phase is Phase.COMPUTING and group is self.group:
            self.phase = Phase.EXPERTS
            group.call(self, None)

    def _commit(self) -> None:
        """The tokens of this step are out."""
        tokens = self._scheduled
        for request, attempt in self.requests:
            if request.attempt == attempt:
                done = min(tokens, request.left)
                request.left -= done
                tokens -= done
        self.requests = [
            (request, attempt)
            for request, attempt in self.requests
            if request.left and request.attempt == attempt
        ]

    def call_failed(self, group: Group, suspects: list[str], evidence: Evidence) -> None:
        """The collective that the step thread was in has failed.

        What was scheduled is scheduled again.
        """
        self.world.step_after(self, 0, self._interrupted, group, suspects, evidence)

    def _interrupted(self, group: Group, suspects: list[str], evidence: Evidence) -> None:
        if group is not self.group or self.phase not in (Phase.HEADERS, Phase.EXPERTS):
            return
        self.world.checker.interrupted(self, f"{evidence} {suspects}")
        self.phase = Phase.WAITING
        self._carry_out(self.recovery.group_failed(group.form.epoch, suspects, evidence))
        self.world.provoke("interrupted", self)
        self.loop()

    # ---- from outside

    def accept(self, request: Request, attempt: int) -> None:
        """A router sends a request."""
        if self.draining or self.member_state.state is not State.READY:
            self.world.refuse(request, attempt)
            return
        self.requests.append((request, attempt))
        self._poke()

    def drain(self) -> None:
        """Begin to drain, as on SIGTERM."""
        if self.draining:
            return
        if (
            self.member_state.state is not State.READY
        ):  # it ends at once, and others may be in a group with it
            self.world.checker.has_faults = True
            self.world.leave(self)
            return
        self.draining = True
        self.member_state.state = State.DRAINING
        self.say()
        self._poke()

    def leave_message(self) -> Leave:
        return Leave(self.name)

    def group_ends(self, how: End) -> None:
        """The process ends: all its ends close."""
        self.world.close_groups_of(self, None, how)
