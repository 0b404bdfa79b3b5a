"""A communicator whose calls are rounds, whatever carries them.

A call is checked against its plan (:mod:`parallel.rounds.plans`), its deadline begins, the rounds exchange.
Shared memory, links and both together differ in their rounds, and in how the members form the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import torch

from parallel.communicators.base import CollectiveError
from parallel.rounds.arithmetic import check_peer, plain
from parallel.rounds.contract import Rounds
from parallel.rounds.plans import Plans


class MemberHealth(Protocol):
    """Health of a group, as a communicator uses it: see :mod:`parallel.rounds.group_health`."""

    on_broken: Callable[[CollectiveError], None] | None

    @property
    def reason(self) -> str | None:
        """Why the group is broken; None while it is not."""
        ...

    def begin(self, call: str) -> None: ...
    def check(self, rank: int, has_arrived: Callable[[], bool]) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class RoundsCommunicator:
    """One member whose calls are rounds; see :class:`parallel.communicators.base.Communicator`."""

    def __init__(self, rank: int, size: int, health: MemberHealth) -> None:
        """A member of a group that forms: it takes calls once its :attr:`plans` are there."""
        self.rank, self.size = rank, size
        self.health = health
        self.processes: dict[int, int] = {}
        self.is_crowded = True
        """Whether this host has more members than cores."""
        self.plans: Plans | None = None
        """The rounds and their plans; None before the group has formed, and after :meth:`close`."""

    def __repr__(self) -> str:
        state = self.health.reason or "open"
        return f"<{type(self).__name__} rank {self.rank} of {self.size}, {state}>"

    @property
    def on_broken(self) -> Callable[[CollectiveError], None] | None:
        """See the contract; only members that watch each other between calls call it."""
        return self.health.on_broken

    @on_broken.setter
    def on_broken(self, call: Callable[[CollectiveError], None] | None) -> None:
        self.health.on_broken = call

    # ---- the contract

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return self._begin("all_gather_ints").all_gather_ints(row)

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._into_new("all_gather", part, sizes)

    def all_gather_view(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        plans = self.plans or self._closed("all_gather_view")
        plan, given = plans.start("all_gather_view", part, sizes, ())
        whole: torch.Tensor = plan.run(given)
        return whole

    def reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._into_new("reduce_scatter", whole, sizes)

    def all_to_all(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        return self._into_new("all_to_all", outgoing, send_sizes, receive_sizes)

    def all_to_all_views(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        plans = self.plans or self._closed("all_to_all_views")
        plan, given = plans.start("all_to_all_views", outgoing, send_sizes, receive_sizes)
        parts: list[torch.Tensor] = plan.run(given)
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._into_new("all_reduce", tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        given = plain(tensor)
        result = given.clone() if source == self.rank else torch.empty_like(given)
        self.broadcast_into(result, source)
        return result

    def send(self, tensor: torch.Tensor, to: int) -> None:
        given = plain(tensor)
        check_peer(self.rank, to, self.size)
        self._begin("send").send(given, to)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        result = torch.empty_like(plain(like))
        self.receive_into(result, source)
        return result

    def abort(self) -> None:
        self.health.abort()

    def close(self) -> None:
        self.health.close()
        self.plans = None

    # ---- calls whose result goes into a given tensor

    def broadcast_into(self, result: torch.Tensor, source: int) -> None:
        """Fill a contiguous tensor with that of ``source``."""
        self._begin("broadcast").broadcast(result, source)

    def receive_into(self, result: torch.Tensor, source: int) -> None:
        """Fill a contiguous tensor with one that ``source`` sends."""
        check_peer(self.rank, source, self.size)
        self._begin("receive").receive(result, source)

    def run_into(
        self,
        call: str,
        given: torch.Tensor,
        result: torch.Tensor,
        sizes: Sequence[int] = (),
        receive_sizes: Sequence[int] = (),
    ) -> None:
        """Make the call of this name, with its result in a given contiguous tensor."""
        plan, given = (self.plans or self._closed(call)).start(call, given, sizes, receive_sizes)
        plan.run(given, result)

    def _into_new(
        self, call: str, given: torch.Tensor, sizes: Sequence[int] = (), receive_sizes: Sequence[int] = ()
    ) -> torch.Tensor:
        """The call of this name, with its result in a new tensor."""
        plan, given = (self.plans or self._closed(call)).start(call, given, sizes, receive_sizes)
        result = torch.empty_like(given) if plan.alike else given.new_empty(plan.fresh)
        plan.run(given, result)
        return result

    # ---- how a call begins

    def _begin(self, call: str) -> Rounds:
        """Start the call's deadline; return the rounds.

        A holder of the rounds holds their memory, even if another thread closes this communicator.
        """
        plans = self.plans or self._closed(call)
        self.health.begin(call)
        return plans.rounds

    def _closed(self, call: str) -> NoReturn:
        """Raise the reason why this communicator is closed."""
        self.health.begin(call)
        raise AssertionError("a group without plans is closed, and has a reason")

    # ---- for native code that exchanges by itself

    @property
    def is_native(self) -> bool:
        """Whether collectives are calls into C++."""
        return self.plans is not None and self.plans.rounds.is_native

    def begin_exchange(self, call: str) -> None:
        """Begin a call that waits by itself; its deadline is the communicator's.

        Raises:
            CollectiveError: the group is broken.
        """
        self.health.begin(call)

    def check_exchange(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """Check a wait for member ``rank``; called every few milliseconds.

        Raises:
            CollectiveError: the wait can no longer end well; from now on all calls fail, here and at the
                others.
        """
        self.health.check(rank, has_arrived)
