"""Schedules in which every token is checked: real engine cores, and a real ledger.

The token at a position follows from the request alone: its prompt, its seed, and which of the ``n`` samples it
is. So wherever requests go on, their clients get one sequence, each token once.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from engine.core import EngineCore
from engine.messages import Abort, Delta, FinishReason, RequestRefused, Submit
from engine.sampling import SamplingParams
from engine.scheduling.outgoing_tokens import OutgoingTokens
from engine.scheduling.request import stream_seed
from router.dispatch.delivery import Delivery
from router.dispatch.ledger import Entry, Ledger
from router.mesh import Prompt
from tests.engine.simulated_executor import VOCAB
from tests.simulator.elastic.checker import Rule
from tests.simulator.elastic.instance import Instance
from tests.simulator.elastic.serving import ServingInstance, drawn_token
from tests.simulator.elastic.world import Request, World
from tests.simulator.schedule import Violation, run_schedule

COMMON = list(range(1, 17))
"""Tokens that many prompts begin with, so that blocks are shared."""


class Reader:
    """The client of a request: knows what it is to get."""

    def __init__(self, world: StreamWorld, request: Request, prompt: Prompt) -> None:
        self._world, self._request, self._prompt = world, request, prompt
        self._ids = list(prompt.prompt_ids)
        self._seed = stream_seed(prompt.seed, prompt.sample_index)
        self._has_ended = False

    def push(self, delta: Delta) -> None:
        """Tokens that wake the reader."""
        for token_id in delta.token_ids:
            self.take_token(token_id, 0.0)
        if delta.finish_reason is not None:
            if self._request.left or delta.finish_reason is not FinishReason.LENGTH or self._has_ended:
                self._broken(f"ends ({delta.finish_reason}, {delta.error}) with {self._request.left} to come")
            self._has_ended = True

    def take(self, delta: Delta) -> bool:
        """See :class:`router.mesh.TokenSink`."""
        self.push(delta)
        return True

    def take_token(self, token_id: int, _now: float) -> bool:
        """See :class:`router.mesh.TokenSink`."""
        expected = drawn_token(self._ids, self._seed)
        if token_id != expected or not self._request.left:
            self._broken(f"gets {token_id} instead of {expected}, {self._request.left} to come")
        self._ids.append(token_id)
        self._request.left -= 1
        return True

    def fail(self, error: Exception) -> None:
        """The world raises the error itself."""

    def _broken(self, what: str) -> None:
        self._world.failed(Rule.TOKENS, f"request {self._prompt.request_id} {what}")


class StreamWorld(World):
    """The mesh of one schedule, with requests of real tokens."""

    MAX_EVENTS = 200_000
    core_class: type[EngineCore] = EngineCore
    ledger_class: type[Ledger] = Ledger
    entry_class: type[Entry] = Entry
    instance_class: type[Instance] = ServingInstance

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._draws = random.Random(f"streams {seed}")
        self.in_flight = self._draws.choice((1, 1, 2, 3))
        """Most steps under way at an instance."""
        self.runs_ahead = self.in_flight == 2 and random.Random(f"ahead {seed}").random() < 0.5
        """Whether the second follows tokens of the first that are not known yet."""
        self.num_blocks = self._draws.choice((11, 14, 30))
        """Blocks of an instance's cache: few, so that requests give way."""
        self.ledger = self.ledger_class()
        self._entries: dict[Request, Entry] = {}
        self._requests: dict[Entry, Request] = {}
        self._readers: dict[Entry, Reader] = {}
        streams: Any = self._readers
        self._delivery = Delivery(self.ledger, streams, lambda *_: None, lambda _: None)
        self._dispatches = 0
        self._lag = self._draws.choice((0, 0, 10, 40))
        """Ticks that tokens are under way to the router at least."""
        self._violation: Violation | None = None
        for _ in range(self._draws.choice((0, 4, 10))):
            self.after(None, 50 + self._draws.randrange(self.settings.span + 100), self._arrive)
        self._bound += 20 * 40 * (self.settings.compute + self.settings.gather + 5)

    def run(self) -> None:
        try:
            super().run()
        finally:
            for instance in self._serving():
                instance.fiber.close()

    def _serving(self) -> list[ServingInstance]:
        return [each for each in self.instances.values() if isinstance(each, ServingInstance)]

    # ---- the router

    def _arrive(self) -> None:
        draws = self._draws
        ids = COMMON[: draws.choice((0, 4, 9, 16))]
        ids += [draws.randrange(VOCAB - 1) for _ in range(draws.randrange(1, 6))]
        tokens = draws.choice((1, 3, 10, 20))
        prompt = Prompt(
            request_id=f"r{len(self.requests)}",
            prompt_ids=ids,
            params=SamplingParams(max_tokens=tokens, ignore_eos=True),
            seed=draws.randrange(2**32),
            sample_index=draws.randrange(3),
        )
        request, entry = Request(tokens, self.now), self.entry_class(prompt)
        self._entries[request], self._requests[entry] = entry, request
        self._readers[entry] = Reader(self, request, prompt)
        self.requests.append(request)
        self._place(request)

    def _place(self, request: Request) -> None:
        entry = self._entries[request]
        before, address = request.home, entry.address
        if before is not None and address is not None and before.alive:
            self._to_instance(before, Abort([address[1]]))
        able = [each for each in self.instances.values() if each.serves and each is not before]
        request.attempt += 1
        if not able:
            request.home = None
            self.ledger.drop(entry)
            self.after(None, 20, self._try_again, request, request.attempt)
            return
        home = request.home = self.rng.choice(able)
        self._dispatches += 1
        self.checker.counts["requests resumed"] += bool(entry.emitted)
        self.ledger.place(entry, home.name, self._dispatches)
        entry.owed = entry.owed or entry.attempts > 1
        if self._draws.random() < 0.5:  # its reader waits
            entry.sink = self._readers[entry]
        submit = entry.submit(self._dispatches)
        self._to_instance(home, msgspec.structs.replace(submit, output_ids=submit.output_ids[:]))

    def _to_instance(self, instance: Instance, message: Submit | Abort) -> None:
        self._send(("router", instance.name), None, self._arrives_at, (instance, message))

    def _arrives_at(self, instance: ServingInstance, message: Submit | Abort) -> None:
        if instance.alive:
            instance.receive(message)

    def to_router(self, instance: Instance, message: OutgoingTokens | RequestRefused) -> None:
        """An instance hands tokens out, or sends a request elsewhere."""
        link = (instance.name, "router")
        self._send(link, None, self._router_hears, (instance, message), self._lag)

    def _router_hears(self, instance: Instance, message: OutgoingTokens | RequestRefused) -> None:
        if isinstance(message, RequestRefused):
            entry = self.ledger.find(instance.name, message.request)
            if entry is not None:
                request = self._requests[entry]
                self.refuse(request, request.attempt)
            return
        late = sum(self.ledger.find(instance.name, delta.request) is None for delta in message)
        self.checker.counts["late tokens"] += late
        self._delivery.singles(instance.name, message.singles)
        self._delivery.deltas(instance.name, message.deltas)
        if self._violation is not None:
            raise self._violation

    def failed(self, rule: Rule, what: str) -> None:
        """A reader finds a rule broken; what delivers to it catches errors of readers."""
        try:
            self.checker.broken(rule, what)
        except Violation as violation:
            self._violation = violation
            raise

    def _leave(self, victim: Instance) -> None:
        super()._leave(victim)
        if victim.draining and self._draws.random() < 0.5:
            self.move_requests(victim)

    # ---- the end

    def ends(self) -> None:
        super().ends()
        if len(self.ledger):
            self.checker.broken(Rule.TOKENS, f"{self.ledger!r} though nothing is to come")
        for instance in self._serving():
            counters = instance.core.reports.report(0, 0)
            self.checker.counts["preemptions"] += counters.counters.preemptions
            if instance.alive and (instance.is_busy or counters.blocks_used):
                self.checker.broken(Rule.NOTHING_STAYS, f"{instance!r}, {counters.blocks_used} blocks")


def simulate_streams(seed: int) -> World:
    """Run the schedule of a seed; see :func:`tests.simulator.schedule.run_schedule`."""
    return run_schedule(seed, StreamWorld(seed))
