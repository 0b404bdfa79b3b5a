"""Registration: which instance is welcome, which rank it gets, and which one must wait (pure)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from coordinator.membership.admission import (
    OneModel,
    crowd_for,
    lacks_adapters,
    other_class,
    problem_with,
    without_adapters,
)
from coordinator.membership.groups import Groups
from coordinator.membership.records import Instruction, Note, Peer, Record, Send
from coordinator.membership.roster import Roster
from coordinator.membership.standing_orders import Orders
from coordinator.messages import (
    AdmissionRefused,
    AdmissionWait,
    Evidence,
    Register,
    StandingOrders,
    State,
    Welcome,
)
from coordinator.views import ViewLog

NO_ORDERS = StandingOrders()


class Registration:
    """Answers to instances that register."""

    def __init__(self, roster: Roster, groups: Groups, model: OneModel, orders: Orders, log: ViewLog) -> None:
        self._orders = orders
        self._roster = roster
        self._groups = groups
        self._model = model
        self._log = log

    def __repr__(self) -> str:
        return f"<Registration {self._roster!r}>"

    def register(self, peer: Peer, message: Register, now: float) -> Iterator[Instruction]:
        """Answer a registration; a welcome instance is in the roster from now on."""
        roster = self._roster
        known = roster.records.named(message.instance)
        if known is not None:  # our Welcome was lost, or the instance reconnected
            known.peer, known.heard_at, known.contested_at = peer, now, None
            self._orders.learn(message.orders)
            yield Send(peer, self._welcome(known, message))
            return
        theirs = message.orders or NO_ORDERS
        has_list = self._orders.change_adapters or theirs.adapters.number > 0
        problem = self._problem_with(message, has_list=has_list)
        if not has_list and lacks_adapters(message):
            if not self._orders.knows_all:
                yield Send(peer, AdmissionWait("waits for instances that know the mesh's adapters"))
                return
            problem = problem or "it cannot read its adapters (--lora-modules), as its log says"
        change = self._orders.change_weights or theirs.weights.number > 0
        problem = problem or self._model.problem_with(message.numerics, change=change)
        remark = None
        if message.numerics is not None and not change:
            remark = other_class(message.numerics, roster.records.classes())
        if problem is None and remark is not None and roster.rules.require_same_numerics:
            if roster.may_all_be_dead(message.numerics, now):
                yield Send(peer, AdmissionWait(f"{remark}; are they alive?"))
                return
            problem = remark
        if problem is not None:
            yield from _refuse(peer, message, problem)
            return
        if roster.settings is None and message.settings is None:
            yield Send(peer, AdmissionWait("no instance has brought a model yet"))
            return
        crowd = crowd_for(message, roster.settings, roster.records)
        if crowd is not None:
            yield from self._turn_away(peer, message, crowd, now)
            return
        wanted = message.rank
        if wanted in roster.records and (message.epoch > 0 or message.rank_was_given):
            # It was here before, and somebody took its place meanwhile, perhaps by being the first to find a
            # coordinator that was started again: any other will do.
            wanted = None
        if wanted is not None and wanted in roster.records:
            yield from self._contest(peer, roster.records[wanted], message.instance, now)
            return
        rank = roster.free_rank() if wanted is None else wanted
        self._groups.epochs.learn(message.epoch, message.group, now)
        self._orders.learn(message.orders)
        record = Record(message.instance, rank, peer, message.host, message.pid, heard_at=now)
        record.registered_at = now
        record.numerics = message.numerics
        roster.add(record, message)
        yield Note(f"instance {rank} registered from {message.host} (pid {message.pid})")
        if remark is not None:
            yield note_of_class(record, remark)
        yield Send(peer, self._welcome(record, message))
        self._log.touch(record.instance)

    def _problem_with(self, message: Register, *, has_list: bool) -> str | None:
        """Why an instance can never join; ``has_list``: standing orders name the mesh's adapters."""
        roster, settings = self._roster, self._roster.settings
        if has_list and settings is not None and settings.lora is not None:
            lora = msgspec.structs.replace(settings.lora, adapters=())
            settings, message = msgspec.structs.replace(settings, lora=lora), without_adapters(message)
        return problem_with(message, roster.size, settings, roster.records)

    def _turn_away(self, peer: Peer, message: Register, crowd: str, now: float) -> Iterator[Instruction]:
        """Answer one instance more than there are experts for.

        Who was here before, or comes in the place of one that may be dead, waits for a place; others need
        not.
        """
        records = self._roster.records.values()
        if message.epoch > 0 or any(self._roster.may_be_dead(record, now) for record in records):
            yield Send(peer, AdmissionWait(crowd))
        else:
            yield from _refuse(peer, message, crowd)

    def _contest(self, peer: Peer, holder: Record, newcomer: str, now: float) -> Iterator[Instruction]:
        """Answer an instance that wants the rank of another.

        Its holder keeps it if it gives a sign of life after the contest began; a holder that is dead falls
        silent and is taken out, and then the newcomer gets the rank. Who began a contest may have gone away
        since: an old one says nothing of whether the holder lives now.
        """
        rank = holder.rank
        if holder.contested_at is None or now - holder.contested_at > self._roster.rules.member_timeout:
            holder.contested_at = now
            if self._roster.spreads and holder.state is not State.LOADING:
                yield from self._groups.accuse(holder, newcomer, Evidence.CLOSED, now)
        owner = f"{holder.host} (pid {holder.pid})"
        if holder.heard_at > holder.contested_at:
            holder.contested_at = None  # settled: the next newcomer begins another
            yield Send(peer, AdmissionRefused(f"rank {rank} is taken by {owner}: choose another, or none"))
        else:
            yield Send(peer, AdmissionWait(f"rank {rank} is held by {owner}; is it alive?"))

    def _welcome(self, record: Record, message: Register) -> Welcome:
        epochs, settings = self._groups.epochs, self._roster.settings
        assert settings is not None
        return Welcome(
            rank=record.rank,
            settings=settings,
            epoch=epochs.number,
            heartbeat_interval=self._roster.rules.heartbeat_interval,
            orders=self._orders.for_newcomers(),
            fenced=self._roster.spreads and epochs.fences(record.instance, message.epoch, message.group),
        )


def note_of_class(record: Record, remark: str) -> Note:
    """Warning that an instance is of another numerics class than the mesh."""
    return Note(f"instance {record.rank} may give other bits for the same seed: {remark}", warning=True)


def _refuse(peer: Peer, message: Register, reason: str) -> Iterator[Instruction]:
    yield Note(f"refused an instance of {message.host} (pid {message.pid}): {reason}", warning=True)
    yield Send(peer, AdmissionRefused(reason))
