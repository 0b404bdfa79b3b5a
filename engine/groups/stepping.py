"""Step coordination of an instance: alone, or in lockstep with its group.

The step loop asks :meth:`Stepping.turn` in each turn and :meth:`Stepping.agree` before each step. Independent
instances (dense models, or experts whole on each) always may step. In lockstep the answer comes from the
headers of all instances (:mod:`parallel.lockstep`), exchanged over the group's communicator; wakes travel
over ZeroMQ. How one group follows another is :mod:`engine.groups.elastic`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import Sender, with_room
from engine.groups.recovery import StepOn as MayStep
from engine.groups.recovery import Turn
from engine.groups.recovery_times import RecoveryTimes
from parallel.links.counts import LinkCount
from parallel.lockstep import Decision, Lockstep, RunStep, Sleep, StepHeader, Switch, Wake, is_only_one

if TYPE_CHECKING:
    from parallel.communicators.base import CollectiveError, Communicator

WAKE_INTERVAL = 0.02
"""Seconds between two repetitions of a wake whose step has not begun."""

PASS_ON_AFTER = 1.0
"""Seconds after which a woken instance passes the wake on, unless the step began.

The sender may have woken this instance alone.
"""


class NoGroup(Exception):
    """Raised when this instance can be in no group of the mesh, with the reason."""


class Agreement(msgspec.Struct, frozen=True):
    """The group's decision about one step."""

    runs: bool
    sizes: tuple[int, ...] = ()
    """Rows of each rank, in lockstep."""
    waited: float = 0.0
    """Seconds spent waiting for the others' headers."""
    switches_to: int = 0
    """The epoch that all enter instead of this step; 0: none."""
    pauses: bool = False
    """No step follows for now: all sleep, or enter another group."""
    waits_for_change: bool = False
    """No instance has tokens or sleeps: a change of the group is pending."""
    is_only_one: bool = False
    """This instance has rows, and no other has any, or a request that waits."""


class Stepping(Protocol):
    """Interface that decides when one instance steps."""

    times: RecoveryTimes
    """Durations of its group changes."""

    def link_totals(self) -> dict[int, LinkCount]:
        """Link traffic with other instances, by their rank."""
        ...

    @property
    def must_step(self) -> bool:
        """Whether the next step has to be agreed on even without work here."""
        ...

    def turn(self) -> Turn:
        """Whether this instance steps now, waits for a group, or ends; asked each turn.

        Raises:
            NoGroup: it can never step in this mesh.
        """
        ...

    def notice_work(self) -> None:
        """Wake the group, since there is work here."""
        ...

    def on_wake(self, wake: Wake) -> None:
        """Handle the wake of a peer."""
        ...

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int = 0) -> Agreement:
        """Settle the next step, this instance having scheduled ``num_tokens``, with ``in_flight`` steps of
        its own under way.

        Raises:
            parallel.communicators.base.CollectiveError: a peer is lost.
        """
        ...

    def failed(self, error: CollectiveError) -> None:
        """Handle the error of a step, which runs again in the next group."""
        ...

    def drained(self) -> bool:
        """No request is left here and none will come: whether to end now.

        Else :meth:`turn` says when.
        """
        ...

    def is_fenced(self) -> bool:
        """Whether all requests must be forgotten, as the others went on without this instance.

        True once for each time that this happens.
        """
        ...

    def close(self) -> None: ...


class Alone:
    """Stepping of an independent instance: a step whenever there is work."""

    must_step = False

    def __init__(self) -> None:
        self.times = RecoveryTimes()

    def link_totals(self) -> dict[int, LinkCount]:
        return {}

    def turn(self) -> Turn:
        return MayStep()

    def notice_work(self) -> None:
        return

    def on_wake(self, wake: Wake) -> None:
        return

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int = 0) -> Agreement:
        return Agreement(runs=num_tokens > 0)

    def failed(self, error: CollectiveError) -> None:
        raise error

    def drained(self) -> bool:
        return True

    def is_fenced(self) -> bool:
        return False

    def close(self) -> None:
        return


class InLockstep:
    """Stepping in lockstep with all other instances of one group."""

    def __init__(
        self, group: Communicator, epoch: int, peers: Sequence[str], keys: MeshKeys | None = None
    ) -> None:
        """``peers``: the addresses of the other instances."""
        self.group = group
        self._lockstep = Lockstep(group.rank, group.size, epoch)
        self._waker = Waker(peers, keys)

    def __repr__(self) -> str:
        return f"<InLockstep {self._lockstep!r}>"

    @property
    def must_step(self) -> bool:
        return self._lockstep.awake

    def notice_work(self) -> None:
        wake = self._lockstep.wake()
        if wake is not None:
            self._waker.begin(wake)

    def on_wake(self, wake: Wake) -> None:
        slept = not self._lockstep.awake
        self._lockstep.on_wake(wake)
        if slept and self._lockstep.awake:
            self._waker.begin(wake, after=PASS_ON_AFTER)

    def agree(
        self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int, ready_epoch: int
    ) -> Agreement:
        """See :class:`Stepping`; ``ready_epoch`` is for the header. A step in which nobody has tokens, as
        there are some while a change is pending or a pipeline is full, is not computed."""
        header = self._lockstep.header(
            num_tokens,
            queued_prefill=queued_prefill,
            longest=longest,
            ready_epoch=ready_epoch,
            in_flight=in_flight,
        )
        began = time.perf_counter()
        rows = self.group.all_gather_ints(header.ints())
        waited = time.perf_counter() - began
        headers = [StepHeader.of(row) for row in rows]
        decision: Decision = self._lockstep.advance(headers)
        if self._lockstep.outstanding_wake is None:
            self._waker.end()
        match decision:
            case RunStep(sizes):
                pending = not any(sizes) and not any(each.in_flight for each in headers)
                return Agreement(
                    any(sizes),
                    sizes,
                    waited,
                    waits_for_change=pending,
                    is_only_one=is_only_one(headers, self.group.rank),
                )
            case Sleep():
                return Agreement(runs=False, waited=waited, pauses=True)
            case Switch(switches_to):
                return Agreement(runs=False, waited=waited, switches_to=switches_to, pauses=True)

    def start(self) -> None:
        """Prepare to wake the others; called soon, from another thread."""
        self._waker.start()

    def close(self) -> None:
        self._waker.close()
        self.group.close()


class Waker:
    """A thread that sends wakes to the peers until the step has begun.

    The step loop itself is by then inside the exchange that it waits for.
    """

    def __init__(self, peers: Sequence[str], keys: MeshKeys | None = None) -> None:
        self._peers = list(peers)
        self._keys = keys
        self._wake: Wake | None = None
        self._begins = 0.0
        """Monotonic time at which the wake is first sent."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it was not; from any thread."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="waker", daemon=True)
                self._thread.start()

    def begin(self, wake: Wake, *, after: float = 0.0) -> None:
        """Send this to all peers, from ``after`` seconds on and until :meth:`end`."""
        with self._changed:
            self._wake, self._begins = wake, time.monotonic() + after
            self._changed.notify()
        self.start()

    def end(self) -> None:
        self._wake = None

    def close(self) -> None:
        with self._changed:
            self._closed, self._wake = True, None
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = with_room(zmq.Context())
        senders: list[Sender[Wake]] = [Sender(context, peer, self._keys) for peer in self._peers]
        while not self._closed:
            wake = self._wake
            if wake is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._wake is not None or self._closed)
                continue
            early = self._begins - time.monotonic()
            for sender in senders if early <= 0 else ():
                sender.send(wake)
            with self._changed:
                if self._wake is wake and not self._closed:
                    self._changed.wait(early if early > 0 else WAKE_INTERVAL)
        for sender in senders:
            sender.close()
        context.term()
