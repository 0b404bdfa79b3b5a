"""Step loop of an instance: take messages in, step, hand tokens out, rest, drain."""

from __future__ import annotations

import time
from collections.abc import Callable

from coordinator.messages import PauseMode
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import Peer
from engine.core import EngineCore
from engine.groups.recovery import AwaitGroup, Enter, LeaveMesh
from engine.messages import (
    Abort,
    Attach,
    EndRequests,
    Prefetch,
    Prefetched,
    Recall,
    Recalled,
    RequestRefused,
    RequestsEnded,
    ResetCache,
    Submit,
    ToInstance,
)
from engine.serving.drain import InstanceDrain
from engine.serving.load_meter import LoadMeter
from engine.serving.router_connections import FAREWELL, RouterConnections
from parallel.communicators.base import CollectiveError
from parallel.links.accepting import total_refused
from parallel.lockstep import Wake

IDLE_WAIT = 0.1
"""Seconds that an idle loop sleeps at most; a message ends it at once."""
QUIET_LOOK = 1.0
"""Seconds between two looks for news for routers, while nothing arrives."""
MAX_MESSAGES_PER_TURN = 1000
"""Messages taken in between two steps: a flood of them must not stop the steps."""


class Server:
    """Serves one instance's routers: :meth:`run` steps until it has drained."""

    def __init__(self, instance: str, address: str, core: EngineCore, keys: MeshKeys | None = None) -> None:
        self._core = core
        self._routers = RouterConnections(instance, address, core, keys)
        self._drain = InstanceDrain(core, self._routers)
        self._look_due = 0.0
        """When to look at rest for news for routers.

        The report to compare takes most of an idle turn.
        """
        core.grammars.on_done = core.admission.images.on_done = self._routers.listener.interrupt
        self.load_meter = LoadMeter(core.reports.capacity.num_blocks)
        self.turn = 0
        """Turns of the step loop so far; the step watch compares them."""

    @property
    def endpoint(self) -> str:
        """Where routers connect, with the real port."""
        return self._routers.listener.endpoint

    @property
    def refused_peers(self) -> int:
        """Connections that this process refused: at its own port, and at those of its groups."""
        return self._routers.listener.refused_peers + total_refused()

    @property
    def leaves_requests(self) -> bool:
        """Whether :meth:`run` ended with requests that other instances have to finish."""
        return self._drain.leaves_requests

    def drain(self, timeout: float) -> None:
        """Finish what is here within ``timeout`` seconds, take nothing new, then let :meth:`run` return.

        What is not finished by then is moved by its routers, with its KV blocks where that can be done.
        """
        self._drain.begin(timeout)

    def leave(self) -> None:
        """Let :meth:`run` return at once; routers resume what is here on other instances."""
        self._drain.begin(0.0, at_once=True)

    @property
    def drain_time_left(self) -> float:
        """Seconds until the drain deadline."""
        return self._drain.time_left

    def set_pause(self, mode: PauseMode | None) -> bool:
        """Pause, or go on, between two steps; returns whether that is in effect.

        Called again until it is.
        """
        if mode is not self._core.pause:
            if mode is PauseMode.ABORT:
                self._routers.end_everything()
            self._core.set_pause(mode)
        return self._core.is_pause_in_effect

    def end_requests(self) -> None:
        """End all requests here with the reason ``abort``."""
        self._routers.end_everything()

    def tell_capacity(self) -> None:
        """Send routers what has changed of this instance's capacity."""
        self._routers.tell_capacity()

    def run(self, between_steps: Callable[[], None] = lambda: None) -> None:
        """The step loop; ``between_steps`` is called once a turn."""
        try:
            while True:
                self.turn += 1
                between_steps()
                self._take_in()  # 1. requests and aborts that came meanwhile
                turn = self._core.stepping.turn()  # 2. is there a group to step in?
                if isinstance(turn, LeaveMesh):
                    break
                if isinstance(turn, Enter):
                    self._core.run_again()
                    self._look_due = 0.0
                steps = not isinstance(turn, AwaitGroup) and self._wants_step()
                if steps:
                    self._step()  # 3. one forward pass; tokens, one message per router
                if self._drain.is_on and self._drain.is_over() and self._core.stepping.drained():
                    break
                if not steps:
                    self._rest()  # 4. tell what changed, sleep until a message
        finally:
            self._routers.hand_out()

    def await_readers(self, patience: float = FAREWELL) -> None:
        """Wait until routers have hung up, which they do when they have read all.

        Called after :meth:`run`, once routers can hear from the coordinator that this instance leaves. What
        they have not read when the connection breaks is lost to them, since ZeroMQ drops it. They would have
        it computed again elsewhere.
        """
        self._routers.await_readers(patience)

    def close(self) -> None:
        """Close the socket. Routers notice the broken connection at once."""
        self._routers.close()

    @property
    def num_steps(self) -> int:
        """Steps scheduled since the start; from any thread."""
        return self._core.scheduler.totals.steps

    def wake(self) -> None:
        """End the sleep of :meth:`run`; from any thread."""
        self._routers.listener.interrupt()

    def _wants_step(self) -> bool:
        if self._core.has_work:
            self._core.stepping.notice_work()
        return self._core.has_work or self._core.stepping.must_step

    def _step(self) -> None:
        self._look_due = 0.0
        try:
            outgoing = self._core.step(self._routers.hand_out)
        except CollectiveError as error:
            self._core.stepping.failed(error)
            return
        finally:
            self._routers.hand_out()  # if no other step was begun
        self._routers.put(outgoing)
        snapshot = self._core.reports.snapshot
        if not (self._core.overlaps and self._core.has_work):
            self._routers.hand_out(snapshot)
        self._routers.report_changes()
        self.load_meter.stepped(snapshot)

    def _rest(self) -> None:
        if not self._core.has_work:
            self.load_meter.rested(self._core.reports.snapshot)
        self._routers.hand_out()
        now = time.monotonic()
        if now >= self._look_due:
            self._look_due = now + QUIET_LOOK
            self._routers.report_changes(at_rest=True)
        if self._routers.listener.wait(IDLE_WAIT):
            self._look_due = 0.0

    def _take_in(self) -> None:
        if self._core.stepping.is_fenced():
            self._routers.drop_everything()
        had_work = self._core.has_work
        for _ in range(MAX_MESSAGES_PER_TURN):
            received = self._routers.listener.receive()
            if received is None:
                break
            self._look_due = 0.0
            self._handle(*received)
        for peer, refused in self._core.take_ready():
            self._routers.tell(peer, refused)
        self._tell_fetched()
        for peer, reset in self._core.sharing.take_resets():
            self._routers.tell(peer, reset)
        self._routers.forget_silent()
        if self._core.has_work and not had_work:
            self.load_meter.stepped(self._core.reports.snapshot)

    def _handle(self, peer: Peer, message: ToInstance) -> None:
        if isinstance(message, Wake):
            self._core.stepping.on_wake(message)
            return
        is_new = peer not in self._routers
        router = self._routers.record_of(peer)
        if router is None:
            return
        match message:
            case Attach():
                self._routers.attach(peer, router, message, is_new=is_new)
            case Submit():
                router.last_dispatch = max(router.last_dispatch, message.request)
                self._submit(peer, message)
            case Abort(numbers):
                self._core.abort(peer, numbers)
            case Recall(numbers):
                self._routers.tell(peer, Recalled(self._core.recall(peer, numbers)))
            case Prefetch():
                self._prefetch(peer, message)
            case EndRequests(number):
                self._routers.end_named(message)
                self._routers.tell(peer, RequestsEnded(number))
            case ResetCache(number):
                self._core.sharing.reset(peer, number)

    def _submit(self, peer: Peer, message: Submit) -> None:
        if self._drain.is_on:
            reason = "the instance is draining"
            refused: RequestRefused | None = RequestRefused(message.request, reason, retry=True, leaves=True)
        else:
            refused = self._core.submit(peer, message)
        if refused is not None:
            self._routers.tell(peer, refused)
        elif (
            self._core.pause is PauseMode.ABORT and message.output_ids
        ):  # it comes from an instance that died
            self._routers.end(peer, [message.request])

    def _prefetch(self, peer: Peer, wish: Prefetch) -> None:
        if self._core.sharing.lends and not self._drain.is_on:
            self._core.prefetch(peer, wish)
        else:
            self._routers.tell(peer, Prefetched(wish.number, 0))

    def _tell_fetched(self) -> None:
        answers = self._core.take_fetched()
        if answers:
            self._routers.hand_out()  # a request's tokens come before the word that it has gone
        for peer, answer in answers:
            self._routers.tell(peer, answer)
