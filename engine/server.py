"""An instance as its routers see it: the socket, the step loop, draining."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from coordinator.messages import Load
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import Listener, Peer, TooLarge
from engine.core import EngineCore
from engine.groups.recovery import AwaitGroup, Enter, LeaveMesh
from engine.messages import (
    Abort,
    Attach,
    Attached,
    CacheReset,
    Delta,
    FinishReason,
    HandedOver,
    InstanceReport,
    Leaving,
    Prefetch,
    Prefetched,
    Recall,
    Recalled,
    RequestRefused,
    ResetCache,
    Submit,
    ToInstance,
    Tokens,
    ToRouter,
)
from engine.scheduling.outgoing_tokens import OutgoingTokens, halves
from engine.scheduling.report_policy import LoadSnapshot, ReportPolicy
from parallel.communicators.base import CollectiveError
from parallel.links.accepting import total_refused
from parallel.lockstep import Wake

logger = logging.getLogger(__name__)

IDLE_WAIT = 0.1
"""Seconds that an idle loop sleeps at most; a message ends it at once."""
QUIET_LOOK = 1.0
"""Seconds between two looks for news for routers, while nothing arrives."""
MAX_MESSAGES_PER_TURN = 1000
"""Messages taken in between two steps: a flood of them must not stop the steps."""
ROUTER_TIMEOUT = 10.0
"""Seconds without a message after which a router and its requests are dropped.

A router attaches every second, one with thousands of instances every four seconds.
"""
FAREWELL, FAREWELL_INTERVAL = 1.0, 0.01
"""Most seconds that a leaving instance waits for its routers, and between two looks."""
RATE_WINDOW = 2.0
"""Seconds over which the token rate is measured."""
Answer = Attached | Recalled | RequestRefused | Prefetched | HandedOver | Leaving | CacheReset
NOTHING = OutgoingTokens()
MOVE_TIMEOUT = 15.0
"""Seconds after a drain's deadline in which requests may move with their KV blocks.

Then they move without."""


class _Router(msgspec.Struct):
    """What the instance remembers of one router."""

    name: str
    heard_at: float
    last_dispatch: int = 0
    report_policy: ReportPolicy = msgspec.field(default_factory=ReportPolicy)
    wants_blocks: bool = False
    has_blocks: int | None = None
    """First change of the prefix cache that it does not know; None: it knows none."""


class Progress:
    """Step count and token rate, read by the membership thread while steps run."""

    def __init__(self, blocks_total: int) -> None:
        self._blocks_total = blocks_total
        self._stepped_at = self._rested_at = time.monotonic()
        self._window: list[tuple[float, int]] = [(self._stepped_at, 0)]
        self._snapshot: LoadSnapshot | None = None

    def stepped(self, snapshot: LoadSnapshot) -> None:
        """Note a step, or that work arrives at an idle instance."""
        idle_for = time.monotonic() - self._stepped_at
        self._stepped_at = time.monotonic()
        if idle_for > RATE_WINDOW:  # a pause is no part of the rate
            self._window = [(self._stepped_at, self._window[-1][1])]
        self._snapshot = snapshot
        self._window.append((self._stepped_at, snapshot.generation_tokens))
        while len(self._window) > 2 and self._window[1][0] < self._stepped_at - RATE_WINDOW:
            self._window.pop(0)

    def rested(self, snapshot: LoadSnapshot) -> None:
        """Called while there is nothing to step.

        Requests may have been aborted since the last step, and those that wait for a grammar are not late.
        """
        self._rested_at = time.monotonic()
        self._snapshot = snapshot

    def load(self) -> Load:
        snapshot, now = self._snapshot, time.monotonic()
        if snapshot is None:
            return Load(blocks_total=self._blocks_total)
        busy = snapshot.running + snapshot.waiting > 0
        (began, before), (ended, after) = self._window[0], self._window[-1]
        fresh = now - ended < RATE_WINDOW and after > before
        return Load(
            running=snapshot.running,
            waiting=snapshot.waiting,
            blocks_used=snapshot.blocks_used,
            blocks_total=self._blocks_total,
            tokens_per_second=(after - before) / max(now - began, 1e-3) if fresh else 0.0,
            steps=snapshot.steps,
            stalled_for=now - max(self._stepped_at, self._rested_at) if busy else 0.0,
        )


class Server:
    """Binds at once; :meth:`run` steps until :meth:`drain` is called and it has drained."""

    def __init__(self, instance: str, address: str, core: EngineCore, keys: MeshKeys | None = None) -> None:
        self._instance = instance
        self._core = core
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listener: Listener[ToInstance, ToRouter] = Listener(
            self._context, address, ToInstance, name="instance", keys=keys
        )
        self._routers: dict[Peer, _Router] = {}
        self._outgoing: dict[Peer, OutgoingTokens] = {}
        """Tokens of the last step, which are handed out while workers compute the next one."""
        self._draining = threading.Event()
        self._drain_until = 0.0
        self._moves_until: float | None = None
        """When the requests here must have moved, once routers were asked to move them."""
        self._goes_at_once = False
        self._look_due = 0.0
        """When to look at rest for news for routers.

        The report to compare takes most of an idle turn.
        """
        core.grammars.on_done = self._listener.interrupt
        self.progress = Progress(core.reports.capacity.num_blocks)
        self.leaves_requests = False
        """Whether :meth:`run` ended with requests that other instances have to finish."""
        self.turn = 0
        """Turns of the step loop so far; the step watch compares them."""

    @property
    def endpoint(self) -> str:
        """Where routers connect, with the real port."""
        return self._listener.endpoint

    @property
    def refused_peers(self) -> int:
        """Connections that this process refused: at its own port, and at those of its groups."""
        return self._listener.refused_peers + total_refused()

    def drain(self, timeout: float) -> None:
        """Finish what is here within ``timeout`` seconds, take nothing new, then let :meth:`run` return.

        What is not finished by then is moved by its routers, with its KV blocks where that can be done.
        """
        self._drain_until = time.monotonic() + timeout
        self._draining.set()

    def leave(self) -> None:
        """Let :meth:`run` return at once; routers resume what is here on other instances."""
        self._goes_at_once = True
        self.drain(0.0)

    @property
    def drain_time_left(self) -> float:
        """Seconds until the drain deadline."""
        return max(0.0, self._drain_until - time.monotonic())

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
                if self._draining.is_set() and self._drained() and self._core.stepping.drained():
                    break
                if not steps:
                    self._rest()  # 4. tell what changed, sleep until a message
        finally:
            self._hand_out()

    def await_readers(self, patience: float = FAREWELL) -> None:
        """Wait until routers have hung up, which they do when they have read all.

        Called after :meth:`run`, once routers can hear from the coordinator that this instance leaves. What
        they have not read when the connection breaks is lost to them, since ZeroMQ drops it. They would have
        it computed again elsewhere.
        """
        until = time.monotonic() + patience
        while time.monotonic() < until and any(self._listener.send(peer, Tokens()) for peer in self._routers):
            time.sleep(FAREWELL_INTERVAL)

    def close(self) -> None:
        """Close the socket. Routers notice the broken connection at once."""
        self._listener.close()
        self._context.term()

    @property
    def num_steps(self) -> int:
        """Scheduled since the start; from any thread."""
        return self._core.scheduler.totals.steps

    def wake(self) -> None:
        """End the sleep of :meth:`run`; from any thread."""
        self._listener.interrupt()

    def _wants_step(self) -> bool:
        if self._core.has_work:
            self._core.stepping.notice_work()
        return self._core.has_work or self._core.stepping.must_step

    def _step(self) -> None:
        self._look_due = 0.0
        try:
            outgoing = self._core.step(self._hand_out)
        except CollectiveError as error:
            self._core.stepping.failed(error)
            return
        finally:
            self._hand_out()  # if no other step was begun
        self._outgoing, snapshot = outgoing, self._core.reports.snapshot
        if not (self._core.overlaps and self._core.has_work):
            self._hand_out(snapshot)
        self._report_changes()
        self.progress.stepped(snapshot)

    def _rest(self) -> None:
        if not self._core.has_work:
            self.progress.rested(self._core.reports.snapshot)
        self._hand_out()
        now = time.monotonic()
        if now >= self._look_due:
            self._look_due = now + QUIET_LOOK
            self._report_changes(at_rest=True)
        if self._listener.wait(IDLE_WAIT):
            self._look_due = 0.0

    # ---- in

    def _take_in(self) -> None:
        if self._core.stepping.is_fenced():
            self._drop_everything()
        had_work = self._core.has_work
        for _ in range(MAX_MESSAGES_PER_TURN):
            received = self._listener.receive()
            if received is None:
                break
            self._look_due = 0.0
            peer, message = received
            if isinstance(message, Wake):
                self._core.stepping.on_wake(message)
                continue
            is_new = peer not in self._routers
            router = self._router(peer)
            if router is None:
                continue
            match message:
                case Attach():
                    router.name, router.wants_blocks = message.router, message.wants_blocks
                    self._core.routers[peer] = router.name
                    if message.missed_blocks:
                        router.has_blocks = None
                    if message.unanswered and not is_new:
                        self._listener.send(
                            peer, Attached(self._instance, self._core.reports.capacity, repeated=True)
                        )
                case Submit():
                    router.last_dispatch = max(router.last_dispatch, message.request)
                    self._submit(peer, message)
                case Abort(numbers):
                    self._core.abort(peer, numbers)
                case Recall(numbers):
                    self._tell(peer, Recalled(self._core.recall(peer, numbers)))
                case Prefetch():
                    self._prefetch(peer, message)
                case ResetCache(number):
                    self._core.sharing.reset(peer, number)
        for peer, refused in self._core.take_compiled():
            self._tell(peer, refused)
        self._tell_fetched()
        for peer, reset in self._core.sharing.take_resets():
            self._tell(peer, reset)
        self._forget_silent_routers()
        if self._core.has_work and not had_work:
            self.progress.stepped(self._core.reports.snapshot)

    def _tell_fetched(self) -> None:
        answers = self._core.take_fetched()
        if answers:
            self._hand_out()  # a request's tokens come before the word that it has gone
        for peer, answer in answers:
            self._tell(peer, answer)

    def _router(self, peer: Peer) -> _Router | None:
        """The record of a connection.

        A new one is sent :class:`Attached`: what its router had here before, over a connection that broke, is
        lost to it. None if that cannot be sent: then nothing is taken from it.
        """
        router = self._routers.get(peer)
        if router is None:
            if not self._listener.send(peer, Attached(self._instance, self._core.reports.capacity)):
                return None
            router = self._routers[peer] = _Router("?", time.monotonic())
        router.heard_at = time.monotonic()
        return router

    def _submit(self, peer: Peer, message: Submit) -> None:
        if self._draining.is_set():
            reason = "the instance is draining"
            refused: RequestRefused | None = RequestRefused(message.request, reason, retry=True, leaves=True)
        else:
            refused = self._core.submit(peer, message)
        if refused is not None:
            self._tell(peer, refused)

    def _prefetch(self, peer: Peer, wish: Prefetch) -> None:
        if self._core.sharing.lends and not self._draining.is_set():
            self._core.prefetch(peer, wish)
        else:
            self._tell(peer, Prefetched(wish.number, 0))

    def _drop_everything(self) -> None:
        """Abort all requests: the group went on without this instance.

        What they have not, they do when they hear that it is lost here.
        """
        for peer in list(self._routers):
            self._core.abort_all(peer)
            self._tell(peer, Attached(self._instance, self._core.reports.capacity))

    def _tell(self, peer: Peer, message: Answer) -> None:
        """Send a message to a router, and forget the router if it cannot be reached.

        It would wait for the message for ever. It is sent :class:`Attached` when it attaches again.
        """
        if not self._listener.send(peer, message) and peer in self._routers:
            self._forget(peer)

    def _forget_silent_routers(self) -> None:
        limit = time.monotonic() - ROUTER_TIMEOUT
        for peer in [peer for peer, router in self._routers.items() if router.heard_at < limit]:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        router = self._routers.pop(peer)
        self._core.routers.pop(peer, None)
        lost = self._core.abort_all(peer)
        if lost:
            logger.warning("router %s is gone; its %d requests are dropped", router.name, lost)

    # ---- out

    def _hand_out(self, snapshot: LoadSnapshot | None = None) -> None:
        """Send the outgoing tokens.

        They wait for the next step to begin, if that is at once.
        """
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, {}
            snapshot, now = snapshot or self._core.reports.snapshot, time.monotonic()
            for peer, tokens in outgoing.items():
                router = self._routers.get(peer)  # None: it is gone since
                if router is not None:
                    tells = router.report_policy.goes_along(snapshot, router.last_dispatch, now)
                    self._send(peer, tokens, self._report(router) if tells else None)

    def _report(self, router: _Router) -> InstanceReport:
        return self._core.reports.report(router.last_dispatch, self._listener.bad_messages)

    def _send(self, peer: Peer, tokens: OutgoingTokens, report: InstanceReport | None) -> None:
        router = self._routers[peer]
        blocks = None
        if report is not None and router.wants_blocks:
            blocks = self._core.reports.block_events(router.has_blocks)
        if not self._send_in_parts(peer, Tokens(tokens.deltas, report, blocks, tokens.singles)):
            self._forget(peer)
            return
        if blocks is not None:
            router.has_blocks = blocks.next
        if report is not None:
            router.report_policy.sent(report, time.monotonic())

    def _send_in_parts(self, peer: Peer, tokens: Tokens) -> bool:
        """Send in one message, or in halves if that is too large.

        Log-probabilities of many long prompts may be.
        """
        try:
            return self._listener.send(peer, tokens)
        except TooLarge as error:
            if len(tokens.deltas) < 2:  # what one request asked for
                numbers = [delta.request for delta in tokens.deltas]
                self._core.abort(peer, numbers)
                why = f"the answer is too large: {error}"
                deltas = [Delta(number, [], FinishReason.ERROR, error=why) for number in numbers]
                return self._listener.send(peer, msgspec.structs.replace(tokens, deltas=deltas, blocks=None))
        return all(self._send_in_parts(peer, part) for part in halves(tokens))

    def _report_changes(self, *, at_rest: bool = False) -> None:
        """Send reports to routers that got none lately.

        At rest they are sent at once, as nothing may change for long.
        """
        now = time.monotonic()
        for peer, router in list(self._routers.items()):
            if at_rest or router.report_policy.may_go_alone(now):
                report = self._report(router)
                lacks_blocks = (
                    router.wants_blocks and router.has_blocks != self._core.reports.num_block_changes
                )
                if lacks_blocks or router.report_policy.is_new(report):
                    self._send(peer, NOTHING, report)

    # ---- the end

    def _drained(self) -> bool:
        if self._core.is_empty and not self._core.sharing.is_lending:
            return True
        if time.monotonic() < self._drain_until:
            return False
        if self._core.is_empty and self._moves_until is None:  # others compute what they lack by now
            return True
        if self._has_time_to_move():
            return False
        if self._core.is_empty:
            return True
        logger.warning("the drain deadline is over: %r is left to the routers", self._core)
        self.leaves_requests = True
        for peer in list(self._routers):
            self._core.abort_all(peer)
        return True

    def _has_time_to_move(self) -> bool:
        """Whether to wait until requests have moved; their routers are asked to move them first."""
        if self._goes_at_once or not self._core.sharing.lends:
            return False
        if self._moves_until is None:
            self._moves_until = time.monotonic() + MOVE_TIMEOUT
            logger.info("the drain deadline is over: %r is to move", self._core)
            for peer in list(self._routers):
                self._tell(peer, Leaving())
        return time.monotonic() < self._moves_until
