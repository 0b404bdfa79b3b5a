"""Who is in the mesh (pure: messages and a clock value in, messages out).

The rules, all of them here: which rank an instance gets, when it is refused, when it is taken for
dead, and what the world and its epoch are. The socket loop around it is :mod:`coordinator.server`.

An instance is *loading* after registration, *ready* once it says so with an address, *draining* when it
is about to leave. The world is the ready ones, and the epoch numbers it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from coordinator.messages import (
    AGREED,
    NEEDS_SIZE,
    Beat,
    Form,
    FromCoordinator,
    Heartbeat,
    Leave,
    Load,
    Member,
    Refused,
    Register,
    Settings,
    State,
    ToCoordinator,
    Unknown,
    View,
    Wait,
    Watch,
    Welcome,
)
from coordinator.messages import Peer as GroupPeer

Peer = bytes

MAX_WATCHERS = 10_000
MAX_INSTANCES = 65_536


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator was told at its start. Times in seconds."""

    name: str = ""
    size: int | None = None
    """``-dp``; None until the first instance brings one."""
    reserved: tuple[int, ...] = ()
    """Ranks that the head's own instances will take; "any" never gets one of them."""
    settings: Settings | None = None
    heartbeat_interval: float = 0.5
    member_timeout: float = 5.0
    loading_timeout: float = 30.0
    """Loading may hold the interpreter for long; silence counts for less then."""
    watcher_timeout: float = 10.0


class Send(msgspec.Struct, frozen=True):
    """Instruction: send this message to this peer."""

    peer: Peer
    message: FromCoordinator


class Note(msgspec.Struct, frozen=True):
    """Instruction: log this line."""

    text: str
    warning: bool = False


Instruction = Send | Note


@dataclass
class _Record:
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
    contested_at: float | None = None
    """When somebody else asked for this rank; cleared by the next sign of life."""

    def member(self) -> Member:
        return Member(
            instance=self.instance,
            rank=self.rank,
            state=self.state,
            phase=self.phase,
            address=self.address,
            host=self.host,
            pid=self.pid,
            load=self.load,
        )


class Membership:
    """The state machine of the coordinator."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._size = rules.size
        self._settings = rules.settings
        self._reserved = set(rules.reserved)
        self._epoch = 0
        self._records: dict[int, _Record] = {}
        self._watchers: dict[Peer, float] = {}
        self._form: Form | None = None

    def __repr__(self) -> str:
        ranks = " ".join(f"{rank}:{record.state}" for rank, record in sorted(self._records.items()))
        return f"<Membership epoch {self._epoch} [{ranks}] {len(self._watchers)} watchers>"

    def handle(self, peer: Peer, message: ToCoordinator, now: float) -> list[Instruction]:
        """React to one message."""
        match message:
            case Register():
                return list(self._register(peer, message, now))
            case Heartbeat():
                return list(self._heartbeat(peer, message, now))
            case Leave():
                return list(self._leave(message))
            case Watch():
                return list(self._watch(peer, now))

    def tick(self, now: float) -> list[Instruction]:
        """Take out those who were silent for too long."""
        instructions: list[Instruction] = []
        for record in list(self._records.values()):
            timeout = (
                self._rules.loading_timeout if record.state is State.LOADING else self._rules.member_timeout
            )
            silence = now - record.heard_at
            if silence > timeout:
                instructions.append(
                    Note(f"instance {record.rank} taken out: silent for {silence:.1f} s", warning=True)
                )
                instructions += self._remove(record)
        for peer, heard_at in list(self._watchers.items()):
            if now - heard_at > self._rules.watcher_timeout:
                del self._watchers[peer]
        return instructions

    def view(self) -> View:
        """The world, for watchers."""
        return View(
            mesh=self._rules.name,
            epoch=self._epoch,
            size=self._size,
            settings=self._settings,
            members=[record.member() for _, record in sorted(self._records.items())],
            waiting_for=self._waiting_for(),
        )

    # ---- registration

    def _register(self, peer: Peer, message: Register, now: float) -> Iterator[Instruction]:
        known = self._by_instance(message.instance)
        if known is not None:  # our Welcome was lost, or the instance reconnected
            known.peer, known.heard_at, known.contested_at = peer, now, None
            yield Send(peer, self._welcome(known))
            return
        problem = self._problem_with(message)
        if problem is not None:
            yield Note(f"refused an instance of {message.host} (pid {message.pid}): {problem}", warning=True)
            yield Send(peer, Refused(problem))
            return
        if self._settings is None and message.settings is None:
            yield Send(peer, Wait("no instance has brought a model yet"))
            return
        if message.rank is not None and message.rank in self._records:
            yield from self._contest(peer, message.rank, now)
            return
        rank = self._free_rank() if message.rank is None else message.rank
        self._settings = self._settings or message.settings
        self._size = self._size or message.size
        self._epoch = max(self._epoch, message.epoch)
        record = _Record(message.instance, rank, peer, message.host, message.pid, heard_at=now)
        self._records[rank] = record
        self._reserved.discard(rank)  # came; should it go, anybody may take its place
        yield Note(f"instance {rank} registered from {message.host} (pid {message.pid})")
        yield Send(peer, self._welcome(record))
        yield from self._publish()

    def _problem_with(self, message: Register) -> str | None:
        """Why an instance can never be in this mesh, None if it can."""
        size = self._size
        if message.size is not None and size is not None and message.size != size:
            return f"-dp {message.size} differs from the mesh's -dp {size}: start all parts with the same -dp"
        for name, number in (("-dp", message.size or 0), ("rank", message.rank or 0)):
            if number >= MAX_INSTANCES:
                return f"{name} {number} is more than the {MAX_INSTANCES} instances that a mesh can have"
        if message.rank is not None and message.rank < 0:
            return f"rank {message.rank} is negative"
        if message.rank is not None and message.size is not None and message.rank >= message.size:
            return (
                f"rank {message.rank} is out of range: with -dp {message.size} ranks are 0 to "
                f"{message.size - 1}"
            )
        if self._form is not None and (size is None or message.rank is None or message.rank >= size):
            return (
                f"the experts are spread over the {size} instances of a complete mesh, and joining it while "
                "it runs is not built yet: start all parts again with a larger -dp, or with "
                "--no-enable-expert-parallel"
            )
        if message.settings is None or self._settings is None:
            return None
        differences = [
            f"{label} is {_shown(getattr(message.settings, key))}, "
            f"the mesh has {_shown(getattr(self._settings, key))}"
            for key, label in AGREED.items()
            if not (message.size is None and key in NEEDS_SIZE)
            and getattr(message.settings, key) != getattr(self._settings, key)
        ]
        if not differences:
            return None
        if message.settings.fingerprint != self._settings.fingerprint:
            differences[0] = (
                f"model is {message.settings.model} (fingerprint {message.settings.fingerprint}), "
                f"the mesh has {self._settings.model} (fingerprint {self._settings.fingerprint})"
            )
        return "this instance differs from the mesh: " + "; ".join(differences)

    def _contest(self, peer: Peer, rank: int, now: float) -> Iterator[Instruction]:
        """A rank is wanted twice. Its holder keeps it if it gives a sign of life after the contest began;
        a holder that is dead falls silent and is taken out, and then the newcomer gets the rank."""
        holder = self._records[rank]
        if holder.contested_at is None:
            holder.contested_at = now
        if holder.heard_at > holder.contested_at:
            yield Send(
                peer,
                Refused(f"rank {rank} is taken by {holder.host} (pid {holder.pid}): choose another, or none"),
            )
        else:
            yield Send(peer, Wait(f"rank {rank} is held by {holder.host} (pid {holder.pid}); is it alive?"))

    def _free_rank(self) -> int:
        rank = 0
        while rank in self._records or rank in self._reserved:
            rank += 1
        return rank

    def _welcome(self, record: _Record) -> Welcome:
        assert self._settings is not None
        return Welcome(
            rank=record.rank,
            settings=self._settings,
            epoch=self._epoch,
            heartbeat_interval=self._rules.heartbeat_interval,
        )

    # ---- life

    def _heartbeat(self, peer: Peer, message: Heartbeat, now: float) -> Iterator[Instruction]:
        record = self._by_instance(message.instance)
        if record is None:
            yield Send(peer, Unknown())
            return
        before = record.state
        changed = (record.state, record.phase, record.address) != (
            message.state,
            message.phase,
            message.address,
        )
        record.peer, record.heard_at, record.load = peer, now, message.load
        record.state, record.phase, record.address = message.state, message.phase, message.address
        record.store = message.store
        if (before is State.READY) != (record.state is State.READY):
            if self._form is None:  # the members of a group got their epoch with it
                self._epoch += 1
            yield Note(f"instance {record.rank} is {record.state}; epoch {self._epoch}")
        if record.state is State.LOADED:
            yield from self._form_group(record, just_loaded=before is not State.LOADED)
        yield Send(peer, Beat(self._epoch, self._neighbours(record)))
        if changed:
            yield from self._publish()

    def _form_group(self, record: _Record, *, just_loaded: bool) -> Iterator[Instruction]:
        """Once all instances of the mesh are loaded, number their epoch and tell them to form its group.
        Whoever still waits at its next heartbeat is told again."""
        members = [member for _, member in sorted(self._records.items())]
        complete = len(members) == self._size and all(member.state is State.LOADED for member in members)
        if just_loaded and complete:
            self._epoch += 1
            self._form = Form(
                epoch=self._epoch,
                store=members[0].store,
                peers=[GroupPeer(member.rank, member.address, member.host) for member in members],
            )
            yield Note(f"{len(members)} instances form the group of epoch {self._epoch}")
            for member in members:
                yield Send(member.peer, self._form)
        elif self._form is not None and not just_loaded:
            yield Send(record.peer, self._form)

    def _leave(self, message: Leave) -> Iterator[Instruction]:
        record = self._by_instance(message.instance)
        if record is not None:
            yield Note(f"instance {record.rank} left")
            yield from self._remove(record)

    def _remove(self, record: _Record) -> Iterator[Instruction]:
        del self._records[record.rank]
        if record.state is State.READY:
            self._epoch += 1
        self._form = None  # a group lives only with all its members
        yield from self._publish()

    def _watch(self, peer: Peer, now: float) -> Iterator[Instruction]:
        if peer in self._watchers or len(self._watchers) < MAX_WATCHERS:
            self._watchers[peer] = now
        yield Send(peer, self.view())

    def _publish(self) -> Iterator[Instruction]:
        view = self.view()
        for peer in self._watchers:
            yield Send(peer, view)

    # ---- questions

    def _by_instance(self, instance: str) -> _Record | None:
        return next((record for record in self._records.values() if record.instance == instance), None)

    def _neighbours(self, record: _Record) -> int:
        return sum(other.host == record.host for other in self._records.values())

    def _waiting_for(self) -> str:
        if self._size is None:
            return "" if self._records else "the first instance to register"
        ready = sum(record.state is State.READY for record in self._records.values())
        if ready >= self._size:
            return ""
        parts = [
            f"rank {rank} ({record.phase})"
            for rank, record in sorted(self._records.items())
            if record.state in (State.LOADING, State.LOADED)
        ]
        missing = self._size - len(self._records)
        if missing > 0:
            absent = [str(rank) for rank in range(self._size) if rank not in self._records]
            parts.append(f"rank{'s' * (missing > 1)} {', '.join(absent[:8])} to register")
        return "; ".join(parts)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
