"""Lockstep agreement on each step of an epoch: run, sleep or switch (pure).

Before each step every instance sends all others one :class:`StepHeader`; :func:`decide` turns the headers
into what happens. It is a pure function of what everybody has, so nobody can disagree, and nobody is
asked: there is no leader, no wave and no dummy batch. An instance without tokens takes part in the
step with zero rows. When all headers say "no work", all sleep.

An instance that gets work while asleep sends a :class:`Wake` to all peers and wakes itself. A wake names the
(epoch, step) that it wants begun. So a stale one is ignored, and an early one is remembered until its step
comes. One for a step beyond the next but one is ignored. A repeated one is harmless; the waker repeats it
until the step has begun. :class:`Lockstep` is the state of one instance; it knows no sockets and no clock.
docs/design/proofs.md has the proof obligations.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

EARLIEST = 1
"""Maximum number of steps by which a wake may be ahead of its receiver.

Its sender has all headers of the previous step, including this instance's.
"""


class LockstepError(RuntimeError):
    """Contradictory step headers: a programming error, never caused by a user."""


class StepHeader(msgspec.Struct, frozen=True, array_like=True):
    """Message of one instance to all others before a step."""

    epoch: int
    step: int
    num_tokens: int
    """Tokens scheduled for this step: the rows that the instance dispatches in every layer."""
    queued_prefill: int = 0
    """Prompt tokens queued at the instance."""
    longest: int = 0
    """Longest context of its rows, in tokens."""
    ready_epoch: int = 0
    """The newest epoch that the instance is ready to switch to.

    Its current one when none is pending.
    """
    in_flight: int = 0
    """Earlier steps with tokens that are under way: more work may follow from them."""

    def ints(self) -> tuple[int, ...]:
        """The header as a list of integers, in field order, for exchange."""
        return msgspec.structs.astuple(self)

    @classmethod
    def of(cls, ints: Sequence[int]) -> StepHeader:
        """Header decoded from the integers that a member sent."""
        return cls(*(int(number) for number in ints))


class RunStep(msgspec.Struct, frozen=True):
    """Compute this step; ``sizes[r]`` rows come from rank r in every expert layer."""

    sizes: tuple[int, ...]


class Sleep(msgspec.Struct, frozen=True):
    """Decision to sleep: no instance has work, and none is in flight.

    The step is empty, and no instance begins the next one before a wake.
    """


class Switch(msgspec.Struct, frozen=True):
    """Decision to switch: all members are ready, so the next epoch begins."""

    epoch: int


Decision = RunStep | Sleep | Switch


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Wake message: asks sleeping members to begin a step, since work has arrived."""

    epoch: int
    step: int


def decide(headers: Sequence[StepHeader]) -> Decision:
    """Decision for a step, from the headers of all ranks in rank order.

    A pending change of epoch counts as work: while some are ready and others are not, empty steps go on.
    So do tokens under way in a pipeline, of which more will come: the steps until then are empty, too.
    All must name the same epoch: who is ready for a later one may have given up the one before it.

    Raises:
        LockstepError: the headers name different steps.
    """
    first = headers[0]
    if any((header.epoch, header.step) != (first.epoch, first.step) for header in headers):
        raise LockstepError(f"headers of different steps: {[(h.epoch, h.step) for h in headers]}")
    ready = [header.ready_epoch for header in headers]
    if min(ready) == max(ready) > first.epoch:
        return Switch(ready[0])
    if max(ready) > first.epoch or any(header.num_tokens or header.in_flight for header in headers):
        return RunStep(tuple(header.num_tokens for header in headers))
    return Sleep()


def is_only_one(headers: Sequence[StepHeader], rank: int) -> bool:
    """Whether this rank alone has tokens in the step, and no other has any.

    It holds for one rank at most. So in the next step no other rank believes to be the only one.
    """
    own = headers[rank].num_tokens > 0
    return own and not any(
        each.num_tokens or each.queued_prefill or each.in_flight
        for other, each in enumerate(headers)
        if other != rank
    )


class Lockstep:
    """One instance's state in the agreement.

    The loop around it: while :attr:`awake`, exchange :meth:`header` with all peers, :meth:`advance` with
    what came back, and do what it says. While asleep, wait for :meth:`on_wake` or call :meth:`wake` when
    there is work. Repeat :attr:`outstanding_wake` to all peers as long as there is one.
    """

    def __init__(self, rank: int, size: int, epoch: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is outside a world of {size}")
        self.rank = rank
        self.size = size
        self.epoch = epoch
        self.step = 0
        """The next step to agree on."""
        self.awake = True
        self.outstanding_wake: Wake | None = None
        """The wake that this instance sent and whose step has not begun yet."""
        self._wanted = -1
        """Latest step of this epoch that some instance has sent a wake for."""

    def __repr__(self) -> str:
        state = "awake" if self.awake else "asleep"
        return f"<Lockstep rank {self.rank}/{self.size} epoch {self.epoch} step {self.step} {state}>"

    def header(
        self,
        num_tokens: int,
        *,
        queued_prefill: int = 0,
        longest: int = 0,
        ready_epoch: int | None = None,
        in_flight: int = 0,
    ) -> StepHeader:
        """This instance's header for the next step."""
        assert self.awake, "a sleeping instance begins no step"
        return StepHeader(
            epoch=self.epoch,
            step=self.step,
            num_tokens=num_tokens,
            queued_prefill=queued_prefill,
            longest=longest,
            ready_epoch=self.epoch if ready_epoch is None else ready_epoch,
            in_flight=in_flight,
        )

    def advance(self, headers: Sequence[StepHeader]) -> Decision:
        """Decide the next step by all members' headers, and go on to the one after.

        Raises:
            LockstepError: they are not the headers of this step and world.
        """
        if len(headers) != self.size:
            raise LockstepError(f"{len(headers)} headers in a world of {self.size}")
        if (headers[self.rank].epoch, headers[self.rank].step) != (self.epoch, self.step):
            raise LockstepError(f"{headers[self.rank]} came back at {self!r}")
        decision = decide(headers)
        if self.outstanding_wake is not None and self.outstanding_wake.step <= self.step:
            self.outstanding_wake = None  # its step has begun everywhere: all headers are here
        self.step += 1
        match decision:
            case Switch(epoch):
                self._enter(epoch)
            case Sleep():
                self.awake = self._wanted >= self.step  # a wake that came early counts now
        return decision

    def on_wake(self, wake: Wake) -> None:
        """Take a peer's request to begin a step.

        A wake for a step beyond the next but one comes from no member.
        """
        if wake.epoch != self.epoch or not self.step <= wake.step <= self.step + EARLIEST:
            return  # of an earlier epoch or step; a later epoch begins awake without it
        self._wanted = max(self._wanted, wake.step)
        if self._wanted >= self.step:
            self.awake = True

    def wake(self) -> Wake | None:
        """Wake this instance for new local work.

        Returns the wake to send to every peer; None if this instance is awake.
        """
        if self.awake:
            return None
        self.awake = True
        self.outstanding_wake = Wake(self.epoch, self.step)
        return self.outstanding_wake

    def _enter(self, epoch: int) -> None:
        self.epoch, self.step, self.awake = epoch, 0, True
        self.outstanding_wake, self._wanted = None, -1
