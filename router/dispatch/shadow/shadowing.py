"""Carries out the shadow checks of one router.

Records drawn answers, has other instances compute them, logs and counts what comes out, and orders drains.
What is checked and decided: :mod:`router.dispatch.shadow.checks`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from coordinator.membership.operations import ACCEPTED
from coordinator.messages import AnswerChecks, Drain, OperatorAnswer, View
from coordinator.process.day_window import DayWindow
from engine.messages import Delta, FinishReason
from router.dispatch.ledger import Entry
from router.dispatch.mover import RequestMover
from router.dispatch.policy import STALLED_AFTER
from router.dispatch.pool import Pool, PooledInstance
from router.dispatch.shadow.checks import (
    LEAVES_ALREADY,
    MAX_CHECK_TOKENS,
    DrainLimit,
    Party,
    ShadowCheck,
    ShadowChecks,
    ShadowVerdict,
    Start,
    Stop,
    can_be_checked,
    is_drawn,
)
from router.dispatch.stream import Owner, Stream
from router.faults import FaultEvent, Faults
from router.mesh import MeshError, Prompt, ShadowResult
from router.recorded import RecordedSample, Recorder, with_logprobs

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 0.05
"""Seconds between two looks for idle instances, while checks wait or are under way."""
ROOM = 0.75
"""Share of slots and of KV blocks in use above which no check begins."""
MAX_NAMED = 8
"""Ranks that the warning names."""
CUT = ""
"""Finish reason of an answer that was cut where its reader had enough."""
FAILURES = (FinishReason.ABORT, FinishReason.ERROR)


class RecordedStream(Stream):
    """A stream whose tokens are recorded for a check.

    The log-probabilities that it needs are taken out if the client did not ask for them.
    """

    def __init__(
        self, owner: Owner, entry: Entry, *, strips: bool, ended: Callable[[RecordedStream], None]
    ) -> None:
        """``ended`` is called once, after the last delta or when the reader had enough."""
        super().__init__(owner, entry)
        self._recorder = Recorder()
        self._num_recorded = 0
        self._strips = strips
        self._ended: Callable[[RecordedStream], None] | None = ended
        self._last: Delta | None = None

    @property
    def entry(self) -> Entry:
        """The request, with what is known of its tries."""
        return self._entry

    @property
    def is_cut(self) -> bool:
        """Whether the reader had enough before the last delta."""
        return self._last is None

    def sample(self) -> RecordedSample | None:
        """Recorded sample; None if it cannot be compared."""
        last = self._last
        if not self._num_recorded or self._num_recorded != len(self._entry.emitted) or self._error:
            return None
        if last is None:
            return self._recorder.sample(CUT, None)
        return None if last.finish_reason in FAILURES else _sample(self._recorder, last)

    def push(self, delta: Delta) -> None:
        """Record a delta, and pass it on."""
        logprobs = delta.logprobs or ()
        if len(logprobs) == len(delta.token_ids):
            self._recorder.add(delta.token_ids, logprobs)
            self._num_recorded += len(delta.token_ids)
        if self._strips:
            delta = msgspec.structs.replace(delta, logprobs=None)
        super().push(delta)
        if delta.finish_reason is not None:
            self._last = delta
            self._end()

    def close(self) -> None:
        """End the record with what came so far, and the request as any other."""
        super().close()
        self._end()

    def _end(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self)


class Shadowing:
    """Runs the shadow checks of a router's share of requests."""

    def __init__(
        self,
        rate: float,
        pool: Pool,
        mover: RequestMover,
        faults: Faults,
        *,
        drain: Callable[[Drain], Awaitable[OperatorAnswer]] | None = None,
        tell: Callable[[dict[str, int]], None] = lambda _: None,
    ) -> None:
        """``drain`` has the coordinator drain an instance; None: differences are only logged.

        ``tell`` gets the number of verdicts against each instance, by name.
        """
        self._rate = rate
        self._pool = pool
        self._mover = mover
        self._faults = faults
        self._drain = drain
        self._tell = tell
        self._checks = ShadowChecks()
        self._checked, self._wrong = DayWindow(), DayWindow()
        self._limit = DrainLimit()
        self._tasks: dict[ShadowCheck, asyncio.Task[None]] = {}
        self._drains: set[asyncio.Task[None]] = set()
        self._added = asyncio.Event()
        self._has_warned = False
        self._shares_experts = False
        self._against: Counter[str] = Counter()
        """Verdicts by the name of the instance that they name."""
        self.differences: Counter[str] = Counter()
        """The same by rank."""

    def __repr__(self) -> str:
        return f"<Shadowing {self._rate:g} {self._checks!r}>"

    @property
    def counts(self) -> Counter[str]:
        """Ended checks: see :class:`router.mesh.ShadowResult`."""
        return self._checks.counts

    def answers(self) -> AnswerChecks:
        """Answers that were compared in the last 24 hours, and those that differed."""
        counts, now = self.counts, time.monotonic()
        wrong = counts[ShadowResult.ODD] + counts[ShadowResult.UNDECIDED]
        checked = wrong + counts[ShadowResult.EQUAL]
        return AnswerChecks(self._checked.count(checked, now), self._wrong.count(wrong, now))

    def generate(self, prompt: Prompt) -> Stream:
        """Send a request as :meth:`.RequestMover.generate`, and record it if it is drawn."""
        drawn = is_drawn(prompt, self._rate) and not prompt.images
        if not drawn or len(prompt.prompt_ids) > MAX_CHECK_TOKENS:
            return self._mover.generate(prompt)
        if not can_be_checked(None, self._parties().values()):
            return self._mover.generate(prompt)
        strips = prompt.params.logprobs is None

        def make_stream(owner: Owner, entry: Entry) -> Stream:
            return RecordedStream(owner, entry, strips=strips, ended=self._ended)

        return self._mover.generate(with_logprobs(prompt), make_stream)

    async def run(self) -> None:
        """Start and stop checks until cancelled."""
        try:
            while True:
                await self._added.wait()
                while self._checks:
                    self._look()
                    await asyncio.sleep(LOOK_INTERVAL)
                self._added.clear()
        finally:
            tasks = [*self._tasks.values(), *self._drains]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def on_view(self, view: View) -> None:
        """Warn once, when all instances are there, of those alone in their class."""
        settings = view.settings
        self._shares_experts = settings is not None and settings.enable_expert_parallel
        if self._has_warned or view.waiting_for or view.size is None or not view.members:
            return
        classes = Counter(each.numerics for each in view.members)
        alone = sorted(
            each.rank
            for each in view.members
            if each.numerics is None or not each.numerics.invariant or classes[each.numerics] == 1
        )
        if alone:
            self._has_warned = True
            logger.warning("%s", _warning(alone, len(view.members)))

    # ---- recording

    def _ended(self, stream: RecordedStream) -> None:
        entry, sample = stream.entry, stream.sample()
        origin = self._origin(entry)
        if sample is None or origin is None:
            if entry.emitted:
                self._checks.skip()
            return
        up_to = len(sample.token_ids) if stream.is_cut else None
        self._checks.add(ShadowCheck(entry.prompt, sample, origin, up_to), time.monotonic())
        self._added.set()

    def _origin(self, entry: Entry) -> Party | None:
        """The only instance that computed a request.

        None if there were several, or if its class cannot be checked.
        """
        names = set(entry.computed_at)
        instance = self._pool.get(names.pop()) if len(names) == 1 else None
        if instance is None or instance.fingerprint != entry.fingerprint or entry.numerics_changes:
            return None
        party = self._party(instance, time.monotonic())
        return party if party.fingerprint is not None else None

    # ---- checks

    def _look(self) -> None:
        for order in self._checks.look(self._parties(), time.monotonic()):
            match order:
                case Start(check, party):
                    self._tasks[check] = asyncio.create_task(self._compute(check, party))
                case Stop(check):
                    self._tasks[check].cancel()
                case ShadowVerdict():
                    self._act_on(order)

    async def _compute(self, check: ShadowCheck, party: Party) -> None:
        """Have an instance compute a check, and act on what comes of it."""
        verdict = None
        try:
            sample = await self._sample_of(check, party)
        except asyncio.CancelledError:
            verdict = self._checks.stopped(check, self._parties(), time.monotonic())
        except MeshError as error:
            logger.debug("shadow check of %s lost at %s: %s", check.prompt.request_id, party, error)
            verdict = self._checks.lost(check, self._parties(), time.monotonic())
        except Exception:
            logger.exception("shadow check of %s failed at %s", check.prompt.request_id, party)
            verdict = self._checks.lost(check, self._parties(), time.monotonic())
        else:
            verdict = self._checks.computed(check, sample, self._parties(), time.monotonic())
        finally:
            del self._tasks[check]
        if verdict is not None:
            self._act_on(verdict)

    async def _sample_of(self, check: ShadowCheck, party: Party) -> RecordedSample:
        """Sample that an instance computes for a check, as far as it is compared.

        Raises:
            MeshError: it is gone, or does not take the request.
        """
        instance = self._pool.get(party.name)
        if instance is None:
            raise _gone(party)
        stream = self._mover.generate_at(_again(check.prompt, instance), instance)
        recorder, left = Recorder(), check.most_tokens
        try:
            async for delta in stream:
                if delta.finish_reason in FAILURES:
                    raise _gone(party)
                recorder.add(delta.token_ids[:left], delta.logprobs or ())
                left -= len(delta.token_ids)
                if left < 0 or (left == 0 and delta.finish_reason is None):
                    return recorder.sample(CUT, None)
                if delta.finish_reason is not None:
                    return _sample(recorder, delta)
        finally:
            stream.close()
        raise _gone(party)

    def _act_on(self, verdict: ShadowVerdict) -> None:
        text = f"shadow check: {verdict}"
        logger.warning("%s", text)
        self._faults.record(FaultEvent.DETECTION, "shadow_difference", text, time.time())
        odd = verdict.odd
        if odd is None:
            return
        self._against[odd.name] += 1
        self.differences[str(odd.rank)] += 1
        self._tell(dict(self._against))
        if self._drain is None:
            return
        problem = self._limit.problem(odd, self._parties(), time.monotonic())
        if problem is not None:
            level = logging.DEBUG if problem == LEAVES_ALREADY else logging.WARNING
            logger.log(level, "instance %d is not drained: %s", odd.rank, problem)
            return
        task = asyncio.create_task(self._order(self._drain, odd))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _order(self, drain: Callable[[Drain], Awaitable[OperatorAnswer]], odd: Party) -> None:
        """Ask the coordinator to drain an instance, and log its answer."""
        wish = Drain(command=uuid.uuid4().hex, rank=odd.rank, instance=odd.name)
        try:
            answer = await drain(wish)
        except TimeoutError:
            self._limit.failed(odd)
            logger.warning("instance %d is not drained yet: the coordinator does not answer", odd.rank)
            return
        if answer.status == ACCEPTED:
            logger.info("drain of instance %d: %s", odd.rank, answer.text)
        else:
            self._limit.failed(odd)
            logger.warning("instance %d is not drained: %s", odd.rank, answer.text)

    # ---- instances

    def _parties(self) -> dict[str, Party]:
        now = time.monotonic()
        return {instance.name: self._party(instance, now) for instance in self._pool}

    def _party(self, instance: PooledInstance, now: float) -> Party:
        numerics, report, limits = instance.member.numerics, instance.report, instance.capacity
        load = instance.candidate(now)
        return Party(
            instance.name,
            instance.rank,
            instance.member.address,
            numerics.fingerprint if numerics is not None and numerics.invariant else None,
            ready=instance.ready and load.stalled_for < STALLED_AFTER and not instance.breaker.failures,
            idle=limits is not None
            and not load.waiting
            and load.requests < ROOM * limits.max_num_seqs
            and load.blocks < ROOM * limits.num_blocks,
            crowded=report is not None and report.queued > 0,
            requests=load.requests,
            leaves=instance.is_leaving,
            shares_experts=self._shares_experts,
        )


def _again(prompt: Prompt, instance: PooledInstance) -> Prompt:
    """The request as it is computed again, without what others would see of it."""
    params = msgspec.structs.replace(prompt.params, prompt_logprobs=None)
    return msgspec.structs.replace(
        prompt,
        request_id=f"{prompt.request_id}-shadow",
        params=params,
        rank=instance.rank,
        session="",
        traceparent="",
        background=True,
    )


def _sample(recorder: Recorder, last: Delta) -> RecordedSample:
    return recorder.sample(str(last.finish_reason), last.stop_reason)


def _gone(party: Party) -> MeshError:
    return MeshError(503, "ServiceUnavailableError", f"{party} does not compute it")


def _warning(alone: list[int], count: int) -> str:
    if count == 1:
        return "--shadow-rate: no request is checked, since the mesh has one instance; a second one may join"
    ranks = ", ".join(map(str, alone[:MAX_NAMED])) + ("..." if len(alone) > MAX_NAMED else "")
    return (
        f"--shadow-rate: requests of rank{'s' * (len(alone) > 1)} {ranks} are not checked, since no second "
        "instance has the same invariant numerics class (lockstep status shows the classes)"
    )
