"""Registry of the mesh's instances (pure: messages and a clock in, messages out).

The rules: which rank an instance gets, when it is silent for too long, and what watchers see. Who can never
join, :mod:`coordinator.membership.admission` knows. The socket loop around it is :mod:`coordinator.server`.

An instance is *loading* after registration, *loaded* once it has its weights, *ready* when it serves,
*draining* when it is about to leave. Where instances are independent, the world is the ready ones, and the
epoch counts its changes. Where experts are spread, the world is a group.
:mod:`coordinator.membership.epochs` decides who is in the next group and when it is formed.
:mod:`coordinator.membership.suspicion` decides who is dead, and :mod:`coordinator.membership.reach` who is
left out of groups though alive.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from operator import attrgetter

import msgspec

from coordinator.membership.admission import OneModel, crowd_for, other_class, problem_with
from coordinator.membership.epochs import Epochs
from coordinator.membership.operations import ACCEPTED, CONFLICT, Operations
from coordinator.membership.reach import Asked, Reachability
from coordinator.membership.records import Instruction, Note, Peer, Publish, Record, Records, Rules, Send
from coordinator.membership.roles import SetRoles
from coordinator.membership.suspicion import Suspicions
from coordinator.messages import (
    AdmissionRefused,
    AdmissionWait,
    Answer,
    Beat,
    Drain,
    Evidence,
    Exited,
    ExpertBalance,
    GroupPlan,
    Heartbeat,
    Leave,
    Lost,
    Member,
    Probe,
    Reached,
    Rebalance,
    Register,
    Scale,
    SetRole,
    Settings,
    State,
    ToCoordinator,
    Unknown,
    View,
    Watch,
    Welcome,
)
from coordinator.numerics import Numerics, combined
from coordinator.views import ViewLog

MAX_WATCHERS = 10_000
"""Peers that get each change of the view; any more get only answers."""
MAX_NAMED = 8
"""Instances that are named as missing; of more, the number is given."""
SILENT_INTERVALS = 4
"""Least heartbeats of an instance that are missed before it is taken out."""
ALIVE_INTERVALS = 1.2
"""An instance is alive if its last heartbeat is at most this many intervals old."""


class Registry:
    """The state machine of the coordinator."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._size = rules.size
        self._settings = rules.settings
        self._model = OneModel()
        self._reserved = set(rules.reserved)
        self._records = Records()
        self._watchers: dict[Peer, float] = {}
        self._newcomers: set[Peer] = set()
        """Watchers that need the whole view."""
        self._log = ViewLog(rules.token)
        self.refused_peers = 0
        """Connections that the listener refused, for the view."""
        self._reach = Reachability(rules, self._records)
        self._epochs = Epochs(rules, self._records, self._reach)
        self._suspicions = Suspicions(rules)
        self._operations = Operations()
        self._roles = SetRoles()
        self._left: set[int] = set()
        """Ranks whose instances were drained: they are not waited for."""
        self._complete = False
        self._common: tuple[str, Numerics | None, GroupPlan | None] = ("", None, None)
        """What all members of the newest group had in common when watchers saw them last."""

    def __repr__(self) -> str:
        ranks = " ".join(f"{rank}:{record.state}" for rank, record in sorted(self._records.items()))
        return f"<Registry epoch {self._epochs.number} [{ranks}] {len(self._watchers)} watchers>"

    def handle(self, peer: Peer, message: ToCoordinator, now: float) -> list[Instruction]:
        """React to one message."""
        instructions = self._react(peer, message, now)
        return [*instructions, *self._push(now)] if self._log.is_due(now) else instructions

    def _react(self, peer: Peer, message: ToCoordinator, now: float) -> list[Instruction]:
        match message:
            case Register():
                instructions = list(self._register(peer, message, now))
            case Heartbeat():
                before = self._state_of(message)
                instructions = list(self._heartbeat(peer, message, now))
                if self._state_of(message) == before and not self._suspicions:
                    return instructions  # nothing new: most heartbeats
            case Lost():
                instructions = list(self._lost(peer, message, now))
            case Reached():
                self._reach.answered(message)
                instructions = []
            case Leave():
                instructions = list(self._leave(message))
            case Exited():
                instructions = list(self._exited(message))
            case Watch():
                return list(self._watch(peer, message, now))
            case Drain():
                return list(self._drain(peer, message))
            case SetRole():
                return list(self._set_role(peer, message))
            case Rebalance():
                return [Send(peer, self._rebalance(message)), *self._go_on(now)]
            case Scale():
                return [Send(*sent) for sent in self._operations.scale(peer, message, now)]
            case Answer():
                return [Send(*sent) for sent in self._operations.answer(message)]
        return [*instructions, *self._go_on(now)]

    def tick(self, now: float) -> list[Instruction]:
        """Remove instances that were silent for too long; send what has changed."""
        instructions: list[Instruction] = []
        if not self._complete and self._knows_all(self._epochs.age(now)):
            self._complete = True
            self._log.touch_head()
        instructions += self._remove_silent(now)
        instructions += self._go_on(now)
        if self._log.is_due(now) or self._log.has_old_loads(now):
            instructions += self._push(now)
        return instructions

    def push_due(self) -> float | None:
        """When :meth:`push` should be called for what has changed; None if nothing has."""
        return self._log.due_at()

    def push(self, now: float) -> list[Instruction]:
        """Send what has changed to the watchers."""
        return list(self._push(now)) if self._log.is_due(now) else []

    def _remove_silent(self, now: float) -> Iterator[Instruction]:
        limit = now - min(self._rules.member_timeout, self._rules.loading_timeout)
        for record in [each for each in self._records.values() if each.heard_at < limit]:
            timeout = (
                self._rules.loading_timeout if record.state is State.LOADING else self._rules.member_timeout
            )
            silence = now - record.heard_at
            if silence > timeout:
                yield Note(f"instance {record.rank} taken out: silent for {silence:.1f} s", warning=True)
                self._remove(record)
        for peer, heard_at in list(self._watchers.items()):
            if now - heard_at > self._rules.watcher_timeout:
                del self._watchers[peer]

    def view(self) -> View:
        """The world as it is now; watchers have that of the last change."""
        return msgspec.structs.replace(self._head(), members=list(self._shown(None)))

    def _head(self) -> View:
        return View(
            mesh=self._rules.name,
            epoch=self._epochs.number,
            size=self._size,
            settings=self._settings,
            members=[],
            waiting_for=self._shortage() or self._waiting_for(),
            refused_peers=self.refused_peers,
            balance=self._epochs.rebalancing.shown(self._records.named) if self._balances else None,
            complete=self._complete,
        )

    def _shortage(self) -> str:
        return self._reach.problem or self._epochs.starved(self._settings) if self._spreads else ""

    def _shown(self, names: Collection[str] | None) -> Iterator[Member]:
        """The named instances that are here, or all by rank, as watchers see them.

        All are returned, too, when something in common has changed for the members of a group.
        """
        shortage = self._shortage()
        shared = self._class_of_group() if self._spreads else None
        common = (shortage, shared, self._epochs.form)
        if names is not None and common != self._common:
            names, self._common = None, common
        if names is None:
            found = [record for _, record in sorted(self._records.items())]
        else:
            found = [record for record in map(self._records.named, names) if record is not None]
        return (self._shown_member(record, shortage, shared) for record in found)

    # ---- registration

    def _register(self, peer: Peer, message: Register, now: float) -> Iterator[Instruction]:
        known = self._records.named(message.instance)
        if known is not None:  # our Welcome was lost, or the instance reconnected
            known.peer, known.heard_at, known.contested_at = peer, now, None
            yield Send(peer, self._welcome(known, message))
            return
        problem = problem_with(message, self._size, self._settings, self._records)
        problem = problem or self._model.problem_with(message.numerics)
        remark = (
            other_class(message.numerics, self._records.classes()) if message.numerics is not None else None
        )
        if problem is None and remark is not None and self._rules.require_same_numerics:
            if self._may_all_be_dead(message.numerics, now):
                yield Send(peer, AdmissionWait(f"{remark}; are they alive?"))
                return
            problem = remark
        if problem is not None:
            yield Note(f"refused an instance of {message.host} (pid {message.pid}): {problem}", warning=True)
            yield Send(peer, AdmissionRefused(problem))
            return
        if self._settings is None and message.settings is None:
            yield Send(peer, AdmissionWait("no instance has brought a model yet"))
            return
        crowd = crowd_for(message, self._settings, self._records)
        if crowd is not None:
            yield from self._turn_away(peer, message, crowd, now)
            return
        wanted = message.rank
        if wanted in self._records and (message.epoch > 0 or message.rank_was_given):
            # It was here before, and somebody took its place meanwhile, perhaps by being the first to find a
            # coordinator that was started again: any other will do.
            wanted = None
        if wanted is not None and wanted in self._records:
            yield from self._contest(peer, message, self._records[wanted], now)
            return
        rank = self._records.free_rank(self._reserved) if wanted is None else wanted
        self._settings = self._settings or message.settings
        self._size = self._size or message.size
        self._epochs.learn(message.epoch, message.group, now)
        record = Record(message.instance, rank, peer, message.host, message.pid, heard_at=now)
        record.registered_at = now
        record.numerics = message.numerics
        self._records.add(record)
        self._left.discard(rank)
        self._reserved.discard(rank)  # came; should it go, anybody may take its place
        yield Note(f"instance {rank} registered from {message.host} (pid {message.pid})")
        if remark is not None:
            yield Note(_of_another_class(record, remark), warning=True)
        yield Send(peer, self._welcome(record, message))
        self._log.touch(record.instance)

    def _turn_away(self, peer: Peer, message: Register, crowd: str, now: float) -> Iterator[Instruction]:
        """One instance more than there are experts for.

        Who was here before, or comes in the place of one that may be dead, waits for a place; others need
        not.
        """
        if message.epoch > 0 or any(self._may_be_dead(record, now) for record in self._records.values()):
            yield Send(peer, AdmissionWait(crowd))
            return
        yield Note(f"refused an instance of {message.host} (pid {message.pid}): {crowd}", warning=True)
        yield Send(peer, AdmissionRefused(crowd))

    def _may_be_dead(self, record: Record, now: float) -> bool:
        """Whether a heartbeat of this instance is overdue."""
        interval = self._longer_interval or self._rules.heartbeat_interval
        return now - record.heard_at > interval * ALIVE_INTERVALS

    def _may_all_be_dead(self, numerics: Numerics | None, now: float) -> bool:
        """Whether heartbeats of all instances of other numerics classes are overdue.

        They answer or are taken out soon. Until then no instance is refused for their sake.
        """
        return all(
            self._may_be_dead(record, now)
            for record in self._records.values()
            if record.numerics not in (None, numerics)
        )

    def _contest(self, peer: Peer, message: Register, holder: Record, now: float) -> Iterator[Instruction]:
        """A rank is wanted twice.

        Its holder keeps it if it gives a sign of life after the contest began; a holder that is dead falls
        silent and is taken out, and then the newcomer gets the rank. Who began a contest may have gone away
        since: an old one says nothing of whether the holder lives now.
        """
        rank = holder.rank
        if holder.contested_at is None or now - holder.contested_at > self._rules.member_timeout:
            holder.contested_at = now
            if self._spreads and holder.state is not State.LOADING:
                yield from self._accuse(holder, message.instance, Evidence.CLOSED, now)
        if holder.heard_at > holder.contested_at:
            holder.contested_at = None  # settled: the next newcomer begins another
            yield Send(
                peer,
                AdmissionRefused(
                    f"rank {rank} is taken by {holder.host} (pid {holder.pid}): choose another, or none"
                ),
            )
        else:
            yield Send(
                peer, AdmissionWait(f"rank {rank} is held by {holder.host} (pid {holder.pid}); is it alive?")
            )

    def _welcome(self, record: Record, message: Register) -> Welcome:
        assert self._settings is not None
        return Welcome(
            rank=record.rank,
            settings=self._settings,
            epoch=self._epochs.number,
            heartbeat_interval=self._rules.heartbeat_interval,
            fenced=self._spreads and self._epochs.fences(record.instance, message.epoch, message.group),
        )

    # ---- life

    def _heartbeat(self, peer: Peer, message: Heartbeat, now: float) -> Iterator[Instruction]:
        record = self._records.named(message.instance)
        if record is None:
            yield Send(peer, Unknown())
            return
        was_ready, numerics = record.state is State.READY, record.numerics
        changed = record.hear(peer, message, now)
        self._records.heard(record)
        if record.numerics != numerics:
            self._records.count_class(record, numerics)
            if (problem := self._model.problem_with(record.numerics)) is not None:
                yield from self._refuse(peer, record, problem)
                return
        remark = self._class_remark(record) if changed else None
        if remark is not None and self._rules.require_same_numerics:
            waits = self._may_all_be_dead(record.numerics, now)  # it may be alone soon
            yield from self._refuse(peer, record, remark, waits=waits)
            return
        if remark is not None and record.numerics != numerics:
            yield Note(_of_another_class(record, remark), warning=True)
        self._suspicions.answered(record.instance, message.answers)
        if self._spreads:
            self._epochs.heard(record)
            plan = self._epochs.sends_again(record, now)
            if plan is not None:
                yield Send(peer, plan)
        elif was_ready != (record.state is State.READY):
            self._epochs.number += 1
        if was_ready != (record.state is State.READY):
            yield Note(f"instance {record.rank} is {record.state}; epoch {self._epochs.number}")
        wish = self._operations.still_wanted(record)
        if wish is not None:
            yield Send(peer, wish)
        role = self._roles.heard(record)
        if role is not None:
            yield Send(peer, role)
        neighbours = self._records.num_on_host(record.host)
        yield Send(peer, Beat(self._epochs.number, neighbours, self._longer_interval))
        if changed:
            self._log.touch(record.instance)

    @property
    def _longer_interval(self) -> float | None:
        """Seconds between two heartbeats of an instance where there are very many.

        Even then some are due before an instance counts as silent.
        """
        shared = len(self._records) / self._rules.most_heartbeats
        if shared <= self._rules.heartbeat_interval:
            return None
        return min(shared, max(self._rules.heartbeat_interval, self._rules.member_timeout / SILENT_INTERVALS))

    def _refuse(
        self, peer: Peer, record: Record, reason: str, *, waits: bool = False
    ) -> Iterator[Instruction]:
        """Take out an instance of another class, or with other weights.

        One that ``waits`` registers again.
        """
        if waits:
            yield Note(f"instance {record.rank} waits, as all others are silent: {reason}", warning=True)
            yield Send(peer, Unknown())
        else:
            yield Note(f"refused instance {record.rank}: {reason}", warning=True)
            yield Send(peer, AdmissionRefused(reason))
        self._remove(record)

    def _leave(self, message: Leave) -> Iterator[Instruction]:
        record = self._records.named(message.instance)
        if record is not None:
            yield Note(f"instance {record.rank} left")
            if record.state not in (State.LOADING, State.LOADED):
                self._left.add(record.rank)
                self._roles.forget(record.rank)
            self._remove(record)

    def _exited(self, message: Exited) -> Iterator[Instruction]:
        record = self._records.named(message.instance)
        if record is not None:
            yield Note(f"instance {record.rank} taken out: its process {message.how}", warning=True)
            self._remove(record)

    def _remove(self, record: Record) -> None:
        self._reach.forget(record.instance)
        self._take_out(record)

    def _take_out(self, record: Record) -> None:
        self._records.remove(record)
        self._suspicions.forget(record.instance)
        if record.state is State.READY and not self._spreads:
            self._epochs.number += 1
        self._log.remove(record.instance)

    # ---- groups

    def _lost(self, peer: Peer, message: Lost, now: float) -> Iterator[Instruction]:
        record = self._records.named(message.instance)
        if record is None:
            yield Send(peer, Unknown())
            return
        if not self._spreads:
            return
        record.heard_at = now
        entered = record.epoch >= message.epoch
        news = self._epochs.lost(message.epoch, message.suspects, entered=entered)
        self._suspicions.waits(record.instance)
        if self._epochs.form is not None and message.epoch == self._epochs.form.epoch:
            # One that has not entered is late, or hangs: that is no evidence about the way to it.
            missed = [name for name in message.suspects if not entered or self._steps_in(name, message.epoch)]
            self._reach.reported(record.instance, missed, message.evidence, entered=entered)
        for name in dict.fromkeys(message.suspects):
            if (other := self._other_member(name, record)) is not None:
                yield from self._accuse(other, record.instance, message.evidence, now)
        if not news:
            return
        suspects = frozenset(message.suspects)
        for name in (peer.instance for peer in self._epochs.form.peers) if self._epochs.form else ():
            if name not in suspects and (other := self._other_member(name, record)) is not None:
                yield from self._probe(other, self._suspicions.ask(name, now))

    def _other_member(self, name: str, record: Record) -> Record | None:
        """The instance of this name, if it is another member of the newest group."""
        other = self._records.named(name)
        return other if other is not record and self._epochs.is_member(name) else None

    def _steps_in(self, instance: str, epoch: int) -> bool:
        """Whether an instance is known to have entered the group of this epoch."""
        record = self._records.named(instance)
        return record is not None and record.epoch >= epoch

    def _accuse(self, record: Record, accuser: str, evidence: Evidence, now: float) -> Iterator[Instruction]:
        yield from self._probe(record, self._suspicions.accuse(record.instance, accuser, evidence, now))

    def _probe(self, record: Record, number: int | None) -> Iterator[Instruction]:
        if number is not None:
            yield Send(record.peer, Probe(number))

    def _go_on(self, now: float) -> Iterator[Instruction]:
        """Act on all that is known by now: remove dead instances, form the next group."""
        self._epochs.age(now)
        if not self._spreads:
            return
        assert self._settings is not None
        dead = self._suspicions.settle(now)
        dead += [
            (record.instance, f"did not prepare epoch {self._epochs.number} in time")
            for record in self._epochs.stragglers(now)
        ]
        for instance, why in dead:
            record = self._records.named(instance)
            if record is not None:
                yield Note(f"instance {record.rank} taken out: {why}", warning=True)
                self._remove(record)
        if self._epochs.begins(now):
            self._suspicions.all_is_well()
            self._reach.has_begun()
            yield Note(f"epoch {self._epochs.number} has begun")
            self._log.touch_head()
        if self._suspicions:
            return
        yield from self._look_at_ways(self._settings, now)
        if self._reach.is_undecided(now):
            return
        size = self._size or self._settings.data_parallel_size
        before = self._epochs.rebalancing.summary
        following = self._epochs.next_form(size, self._settings, now)
        yield from self._tell_balance(before)
        if following is None:
            return
        form, why = following
        self._suspicions.begin_group()
        self._reach.begin_group()
        yield Note(f"{len(form.peers)} instances form the group of epoch {form.epoch}: {why}")
        for records, plan in self._epochs.sends(now):
            yield Publish(tuple(record.peer for record in records), plan)
        self._log.touch_head()

    def _tell_balance(self, before: ExpertBalance) -> Iterator[Instruction]:
        """Log what the balance of experts has to say, and show it to watchers."""
        rebalancing = self._epochs.rebalancing
        notes, rebalancing.notes = rebalancing.notes, []
        for text, warning in notes:
            yield Note(text, warning)
        if rebalancing.summary != before:
            self._log.touch_head()

    def _rebalance(self, message: Rebalance) -> Answer:
        """Answer an operator who wants experts to move now."""
        if not self._balances:
            problem = "the load of experts is not balanced here: start the instances with --enable-eplb"
            return Answer(command=message.command, status=CONFLICT, text=problem)
        self._epochs.rebalancing.ask()
        text = "experts move now, where that makes steps faster: lockstep status shows it"
        return Answer(command=message.command, status=ACCEPTED, text=text)

    @property
    def _balances(self) -> bool:
        """Whether the load of experts is balanced."""
        return self._spreads and self._settings is not None and self._settings.balancing is not None

    def _look_at_ways(self, settings: Settings, now: float) -> Iterator[Instruction]:
        """Leave instances that others do not reach out of groups, and let them back."""
        failure = self._epochs.failure(now)
        if failure is not None:
            yield from self._send_questions(self._reach.failed(*failure, self._epochs.others(), now))
        if self._epochs.starved(settings):
            yield from self._send_questions(self._reach.reconsider(self._epochs.loaded(), now))
        for record, why in self._reach.choose(lambda stay: self._epochs.fits(settings, stay), now):
            yield Note(f"instance {record.rank} is left out: {why}", warning=True)
            self._take_out(record)  # it registers again, and gives up its group and its requests
        yield from self._send_questions(self._reach.look_again(self._epochs.members, now))
        for record in self._reach.let_back(now):
            yield Note(f"instance {record.rank} is let back: all reach it, and it them")
            self._log.touch(record.instance)

    def _send_questions(self, asked: list[Asked]) -> Iterator[Instruction]:
        for record, question in asked:
            yield Send(record.peer, question)

    def _watch(self, peer: Peer, message: Watch, now: float) -> Iterator[Instruction]:
        if message.launcher and message.launcher == self._rules.name:
            self._operations.on_launcher(peer, now)
        if peer in self._watchers or len(self._watchers) < MAX_WATCHERS:
            self._watchers[peer] = now
        for instance, count in message.odd.items():
            record = self._records.named(instance)
            if record is not None and record.hear_odd(message.watcher, count):
                self._log.touch(instance)
        if self._log.has(message.series, message.number):
            yield Send(peer, self._log.current())
        elif len(self._newcomers) < MAX_WATCHERS:  # else it asks again
            self._newcomers.add(peer)
            self._log.touch_head()

    def _push(self, now: float) -> Iterator[Instruction]:
        change = self._log.change(self._head(), self._shown, now)
        followers = tuple(peer for peer in self._watchers if peer not in self._newcomers)
        if change is not None and followers:
            yield Publish(followers, change)
        if self._newcomers:
            yield Publish(tuple(self._newcomers), self._log.whole())
            self._newcomers.clear()

    def _drain(self, peer: Peer, message: Drain) -> Iterator[Instruction]:
        by = "a router, after a shadow check," if message.instance else "an operator"
        yield Note(f"{by} asks instance {message.rank} to drain")
        for sent in self._operations.drain(peer, message, self._records):
            yield Send(*sent)
        record = self._records.get(message.rank)
        if record is not None:
            self._log.touch(record.instance)

    def _set_role(self, peer: Peer, message: SetRole) -> Iterator[Instruction]:
        answer = self._roles.set(message, self._records)
        yield Send(peer, answer)
        record = self._records.get(message.rank)
        if record is None:
            return
        yield Note(f"an operator sets a role: {answer.text}")
        role = self._roles.heard(record)
        if role is not None:
            yield Send(record.peer, role)
        self._log.touch(record.instance)

    # ---- questions

    def _knows_all(self, age: float) -> bool:
        """Whether a coordinator of this age has heard of all live instances.

        They may need a while to find it.
        """
        all_serve = self._size is not None and self._num_ready() >= self._size
        return age >= (self._rules.view_grace if all_serve else self._rules.member_timeout)

    def _num_ready(self) -> int:
        return sum(record.state is State.READY for record in self._records.values())

    @property
    def _spreads(self) -> bool:
        """Whether experts are spread over the instances, which then step in groups."""
        return self._settings is not None and self._settings.enable_expert_parallel

    def _shown_member(self, record: Record, shortage: str, shared: Numerics | None) -> Member:
        """An instance as watchers see it.

        It is ready only if its group can serve. It is draining, or has another role, from the moment of the
        command. ``shared`` is that of the members of the group, if it is not the class of each.
        """
        member = record.member()
        if (role := self._roles.of(record)) is not member.role:
            member = msgspec.structs.replace(member, role=role)
        if shared is not None and self._epochs.is_member(record.instance):
            member = msgspec.structs.replace(member, numerics=shared)
        if record.state.stays and self._operations.was_told(record.instance):
            return msgspec.structs.replace(member, state=State.DRAINING, phase="asked to drain")
        if record.state.stays and (why := self._reach.why(record.instance)):
            return msgspec.structs.replace(member, state=State.LOADED, phase=why)
        if not self._spreads or record.state is not State.READY:
            return member
        if shortage:
            return msgspec.structs.replace(member, state=State.LOADED, phase=f"waits for {shortage}")
        if not self._epochs.is_member(record.instance):
            return msgspec.structs.replace(member, state=State.LOADED)
        return member

    def _class_of_group(self) -> Numerics | None:
        """The class of instances of several classes that compute each other's experts."""
        if len(self._records.classes()) < 2:
            return None
        classes = {
            record.numerics
            for record in self._records.values()
            if record.numerics is not None and self._epochs.is_member(record.instance)
        }
        return combined(classes) if len(classes) > 1 else None

    def _class_remark(self, record: Record) -> str | None:
        """Why an instance that has its weights is of another numerics class than the others."""
        if record.numerics is None and record.state not in (State.LOADED, State.READY):
            return None
        return other_class(record.numerics, self._records.classes(but=record))

    def _state_of(self, message: Heartbeat) -> tuple[State, int, int] | None:
        """What may lead to another group when it changes."""
        record = self._records.named(message.instance)
        return None if record is None else (record.state, record.epoch, record.ready_epoch)

    def _waiting_for(self) -> str:
        if self._size is None:
            return "" if self._records else "the first instance to register"
        if self._num_ready() >= self._size:
            return ""
        starting = [
            record for record in self._records.values() if record.state in (State.LOADING, State.LOADED)
        ]
        first = heapq.nsmallest(MAX_NAMED, starting, key=attrgetter("rank"))
        parts = [
            f"rank {record.rank} ({self._reach.why(record.instance) or record.phase})" for record in first
        ]
        if len(starting) > MAX_NAMED:
            parts.append(f"{len(starting) - MAX_NAMED} more that start")
        absent = [rank for rank in range(self._size) if rank not in self._records and rank not in self._left]
        if absent:
            more = f" and {len(absent) - MAX_NAMED} more" if len(absent) > MAX_NAMED else ""
            ranks = ", ".join(map(str, absent[:MAX_NAMED]))
            parts.append(f"rank{'s' * (len(absent) > 1)} {ranks}{more} to register")
        return "; ".join(parts)


def _of_another_class(record: Record, remark: str) -> str:
    return f"instance {record.rank} may give other bits for the same seed: {remark}"
