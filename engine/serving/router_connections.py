"""Routers that are connected to an instance: their records, and what is sent to them."""

from __future__ import annotations

import logging
import time

import msgspec
import zmq

from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import Listener, Peer, TooLarge
from engine.core import EngineCore
from engine.messages import (
    Attach,
    Attached,
    CacheReset,
    Delta,
    EndRequests,
    FinishReason,
    HandedOver,
    InstanceReport,
    Leaving,
    Prefetched,
    Recalled,
    RequestRefused,
    RequestsEnded,
    ToInstance,
    Tokens,
    ToRouter,
)
from engine.scheduling.outgoing_tokens import OutgoingTokens, halves
from engine.scheduling.report_policy import LoadSnapshot, ReportPolicy

logger = logging.getLogger(__name__)

ROUTER_TIMEOUT = 10.0
"""Seconds without a message after which a router and its requests are dropped.

A router attaches every second, one with thousands of instances every four seconds.
"""
FAREWELL, FAREWELL_INTERVAL = 1.0, 0.01
"""Most seconds that a leaving instance waits for its routers, and between two looks."""
Reply = Attached | Recalled | RequestRefused | Prefetched | HandedOver | Leaving | CacheReset | RequestsEnded
NOTHING = OutgoingTokens()


class RouterRecord(msgspec.Struct):
    """Facts that an instance remembers of one router."""

    name: str
    heard_at: float
    last_dispatch: int = 0
    report_policy: ReportPolicy = msgspec.field(default_factory=ReportPolicy)
    wants_blocks: bool = False
    has_blocks: int | None = None
    """First change of the prefix cache that it does not know; None: it knows none."""


class RouterConnections:
    """Socket of an instance, and records of the routers that are connected to it."""

    def __init__(self, instance: str, address: str, core: EngineCore, keys: MeshKeys | None) -> None:
        self._instance = instance
        self._core = core
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.listener: Listener[ToInstance, ToRouter] = Listener(
            self._context, address, ToInstance, name="instance", keys=keys
        )
        self._routers: dict[Peer, RouterRecord] = {}
        self._outgoing: dict[Peer, OutgoingTokens] = {}
        """Tokens of the last step, which are handed out while workers compute the next one."""

    def __repr__(self) -> str:
        return f"<RouterConnections at {self.listener.endpoint}: {len(self)} routers>"

    def __len__(self) -> int:
        """Routers that are connected."""
        return len(self._routers)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._routers

    def record_of(self, peer: Peer) -> RouterRecord | None:
        """The record of a connection from which a message has come.

        A new one is sent :class:`Attached`: what its router had here before, over a connection that broke, is
        lost to it. None if that cannot be sent: then nothing is taken from it.
        """
        router = self._routers.get(peer)
        if router is None:
            if not self.listener.send(peer, self._attached()):
                return None
            router = self._routers[peer] = RouterRecord("?", time.monotonic())
        router.heard_at = time.monotonic()
        return router

    def attach(self, peer: Peer, router: RouterRecord, message: Attach, *, is_new: bool) -> None:
        """Take in a router's name and wishes; a known router that asks is answered again."""
        router.name, router.wants_blocks = message.router, message.wants_blocks
        self._core.routers[peer] = router.name
        if message.missed_blocks:
            router.has_blocks = None
        if message.unanswered and not is_new:
            self.listener.send(peer, self._attached(repeated=True))

    def tell_capacity(self) -> None:
        """Send routers what has changed of this instance's capacity, behind the tokens made before."""
        self.hand_out()
        self.tell_all(self._attached(repeated=True))

    def tell(self, peer: Peer, message: Reply) -> None:
        """Send a message to a router, and forget the router if it cannot be reached.

        It would wait for the message for ever. It is sent :class:`Attached` when it attaches again.
        """
        if not self.listener.send(peer, message) and peer in self._routers:
            self._forget(peer)

    def tell_all(self, message: Reply) -> None:
        """Send a message to all routers."""
        for peer in list(self._routers):
            self.tell(peer, message)

    def abort_everything(self) -> None:
        """Abort the requests of all routers, which resume them on other instances."""
        for peer in list(self._routers):
            self._core.abort_all(peer)

    def end_everything(self) -> None:
        """End the requests of all routers, which pass the end on to their clients."""
        self.end_named(EndRequests(0, everything=True))

    def end_named(self, message: EndRequests) -> None:
        """End those requests of all routers that a message names."""
        self.hand_out()
        for peer in list(self._routers):
            here = self._core.admission.ids_of(peer)
            self.end(peer, [number for number, id in here.items() if message.names(id)])

    def end(self, peer: Peer, numbers: list[int]) -> None:
        """End requests of a router with the reason ``abort``."""
        self._core.abort(peer, numbers)
        if numbers and peer in self._routers:
            ended = OutgoingTokens(Delta(number, [], FinishReason.ABORT) for number in numbers)
            self._send(peer, ended, None)

    def drop_everything(self) -> None:
        """Abort all requests: the group went on without this instance.

        Routers that did not see it yet learn from :class:`Attached` that the requests are lost here.
        """
        for peer in list(self._routers):
            self._core.abort_all(peer)
            self.tell(peer, self._attached())

    def forget_silent(self) -> None:
        """Drop routers from which nothing has come for long, with their requests."""
        limit = time.monotonic() - ROUTER_TIMEOUT
        for peer in [peer for peer, router in self._routers.items() if router.heard_at < limit]:
            self._forget(peer)

    def await_readers(self, patience: float) -> None:
        """Wait until routers have hung up, which they do when they have read all."""
        until = time.monotonic() + patience
        while time.monotonic() < until and any(self.listener.send(peer, Tokens()) for peer in self._routers):
            time.sleep(FAREWELL_INTERVAL)

    def close(self) -> None:
        """Close the socket. Routers notice the broken connection at once."""
        self.listener.close()
        self._context.term()

    # ---- tokens and reports

    def put(self, outgoing: dict[Peer, OutgoingTokens]) -> None:
        """Take in the tokens of a step, to be sent by :meth:`hand_out`."""
        self._outgoing = outgoing

    def hand_out(self, snapshot: LoadSnapshot | None = None) -> None:
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

    def report_changes(self, *, at_rest: bool = False) -> None:
        """Send reports to routers that got none lately.

        At rest they are sent at once, as nothing may change for long.
        """
        now = time.monotonic()
        for peer, router in list(self._routers.items()):
            if at_rest or router.report_policy.may_go_alone(now):
                report = self._report(router)
                changes = self._core.reports.num_block_changes
                lacks_blocks = router.wants_blocks and router.has_blocks != changes
                if lacks_blocks or router.report_policy.is_new(report):
                    self._send(peer, NOTHING, report)

    def _attached(self, *, repeated: bool = False) -> Attached:
        return Attached(self._instance, self._core.reports.capacity, repeated=repeated)

    def _forget(self, peer: Peer) -> None:
        router = self._routers.pop(peer)
        self._core.routers.pop(peer, None)
        lost = self._core.abort_all(peer)
        if lost:
            logger.warning("router %s is gone; its %d requests are dropped", router.name, lost)

    def _report(self, router: RouterRecord) -> InstanceReport:
        return self._core.reports.report(router.last_dispatch, self.listener.bad_messages)

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
            return self.listener.send(peer, tokens)
        except TooLarge as error:
            if len(tokens.deltas) < 2:  # what one request asked for
                numbers = [delta.request for delta in tokens.deltas]
                self._core.abort(peer, numbers)
                why = f"the answer is too large: {error}"
                deltas = [Delta(number, [], FinishReason.ERROR, error=why) for number in numbers]
                return self.listener.send(peer, msgspec.structs.replace(tokens, deltas=deltas, blocks=None))
        return all(self._send_in_parts(peer, part) for part in halves(tokens))
