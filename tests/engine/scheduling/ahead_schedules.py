"""Schedules of an instance whose steps are scheduled ahead, by seed: arrivals, aborts, deaths.

The device is simulated. It computes a step at once, or only when its result is waited for, by chance; what a row
chooses is a function of its context, and of what the host knew when its step began where the request asks for it.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.groups.recovery_times import RecoveryTimes
from engine.groups.stepping import Agreement
from engine.messages import Delta, FinishReason, Submit, TokenLogprobs
from engine.model.checkpoint import ModelInfo
from engine.pieces.pool import hash_block
from engine.sampling import SamplingParams
from engine.scheduling.ahead import needs_tokens
from engine.scheduling.request import Request, Status, from_submit
from engine.step import ExtraTokens, Step, StepResult
from parallel.communicators.base import CollectiveError
from parallel.links.counts import LinkCount
from tests.engine.oracle import Oracle
from tests.engine.simulated_executor import VOCAB, SimulatedExecutor, _digest, next_token

PEER = b"router"
SIZE = 4
LONGEST = 64
INFO = ModelInfo(
    directory="", architecture="", model_type="", vocab_size=VOCAB, context_length=LONGEST, dtype="float32",
    eos_token_ids=(VOCAB - 1,), num_experts=0,
)  # fmt: skip
GARBAGE = -7
"""Content of a block that something else than a step has written."""


@dataclass
class Held:
    """A request in a slot of the simulated worker, as the host knows it."""

    params: SamplingParams
    known: list[int]
    num_prompt: int


@dataclass
class Begun:
    """A step that has begun: what the host knew by then, and its result."""

    step: Step
    held: list[Held]
    known: list[list[int]]
    allowed: dict[int, list[list[int]]]
    """Tokens that rows may sample, one set for each that they sample."""
    result: StepResult | None = None


class Device(SimulatedExecutor):
    """A simulated device that computes begun steps in their order, some time later."""

    def __init__(self, rng: random.Random, *, ahead: bool, max_rows: int, checks_reads: bool) -> None:
        super().__init__(
            block_size=SIZE,
            budget=16,
            max_rows=max_rows,
            in_flight=1 + ahead,
            runs_ahead=ahead,
            checks_reads=checks_reads,
        )
        self._rng = rng
        self._held: dict[int, Held] = {}
        self._begun: deque[Begun] = deque()
        self._now: Begun | None = None
        self.trouble: Callable[[], None] = lambda: None
        """Called before a step begins and after its end: raises where its group breaks."""
        self.counts: Counter[str] = Counter()

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """Take a step, and maybe compute it."""
        assert len(self._begun) < self.in_flight
        self.trouble()
        for admit in step.admits:
            self._held[admit.slot] = Held(admit.params, list(admit.token_ids), admit.num_prompt)
        held = [self._held[slot] for slot in step.slots]
        allowed: dict[int, list[list[int]]] = {}
        if step.masks is not None:
            width = len(step.masks.bits) // len(step.masks.rows)
            for index, row in enumerate(step.masks.rows):
                bits = step.masks.bits[index * width : (index + 1) * width]
                found = [each for each in range(VOCAB) if bits[each // 8] >> each % 8 & 1]
                allowed.setdefault(row, []).append(found)
        for index, (each, start, end) in enumerate(zip(held, step.starts, step.ends, strict=True)):
            drafted = len(step.drafts.get(index, ()))
            if index in step.ahead:
                assert step.counts[index] == 1
                if start >= len(each.known):
                    assert any(each in begun.held for begun in self._begun), "nothing chooses its token"
                    assert start == len(each.known)
                    self.counts["rows ahead"] += 1
            else:
                assert end - drafted <= len(each.known), "a token is not known, and the step does not show it"
        self._begun.append(Begun(step, held, [each.known[:] for each in held], allowed))
        if self._rng.random() < 0.5:
            self._compute_begun()

    def finish(self) -> StepResult:
        self._compute_begun(self._rng.randrange(1, 3))
        self.trouble()
        begun = self._begun.popleft()
        assert begun.result is not None
        for index, token in enumerate(begun.result.tokens):
            if token is not None:
                held, further = begun.held[index], begun.result.further.get(index)
                draft = len(begun.step.drafts.get(index, ()))
                del held.known[begun.step.ends[index] - draft :]
                held.known += [token, *(further.tokens if further else ())]
        return begun.result

    def forget(self) -> None:
        """A broken group: steps that have begun are not computed, or were in vain."""
        self._begun.clear()

    def write(self, blocks: list[int]) -> None:
        """Write to blocks beside the steps, as a transfer does."""
        for block in blocks:
            for offset in range(SIZE):
                self._cache[block, offset] = GARBAGE

    def is_written(self, blocks: list[int]) -> bool:
        """Whether these blocks have what :meth:`write` wrote."""
        return all(self._cache[block, offset] == GARBAGE for block in blocks for offset in range(SIZE))

    def _compute_begun(self, most: int = 9) -> None:
        for begun in list(self._begun)[:most]:
            if begun.result is None:
                self._now = begun
                result = self._compute(begun.step)
                wanted = {i for i, held in enumerate(begun.held) if held.params.logprobs is not None}
                begun.result = msgspec.structs.replace(
                    result,
                    logprobs={
                        index: _logprobs(token)
                        for index, token in enumerate(result.tokens)
                        if token is not None and index in wanted
                    },
                    further={
                        index: ExtraTokens(each.tokens, [*map(_logprobs, each.tokens)] * (index in wanted))
                        for index, each in result.further.items()
                    },
                )

    def _sample(self, slot: int, start: int, count: int, sample: bool) -> int | None:
        if super()._sample(slot, start, count, sample) is None:
            return None
        assert self._now is not None
        row = self._now.step.slots.index(slot)
        ids, held = self._tokens[slot], self._now.held[row]
        if held.params.shapes_logits_by_history:
            drafted = row in self._now.step.drafts
            history = ids[: start + count] if drafted else self._now.known[row]
            ids[-1] = _digest(tuple(history)) % (VOCAB - 1)
        if row in self._now.allowed:
            step = self._now.step
            allowed = self._now.allowed[row][start - step.starts[row] if row in step.drafts else 0]
            ids[-1] = allowed[ids[-1] % len(allowed)]
        return ids[-1]


class Pattern:
    """A stand-in for :class:`engine.scheduling.grammar.Grammar`: each token is one of three, by those before."""

    def __init__(self, output: Sequence[int]) -> None:
        self._taken = list(output)
        self.ended = False
        self.draft_masks: list[bytes] = []

    def _allowed(self) -> list[int]:
        first = _digest("pattern", tuple(self._taken)) % (VOCAB - 4)
        return [first, first + 1, first + 2]

    def mask(self, num_output: int) -> bytes:
        bits = bytearray(-(-VOCAB // 8))
        for token in self._allowed():
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def follow(self, draft: Sequence[int], num_output: int) -> int:
        """See :meth:`engine.scheduling.grammar.Grammar.follow`."""
        behind, self.draft_masks = Pattern(self._taken), []
        for token in draft:
            self.draft_masks.append(behind.mask(num_output))
            if behind.take(token) is not None:
                return len(self.draft_masks) - 1
        self.draft_masks.append(behind.mask(num_output))
        return len(draft)

    def take(self, token_id: int) -> str | None:
        problem = None if token_id in self._allowed() else f"token {token_id} is not allowed"
        self._taken.append(token_id)
        return problem


class Troubled:
    """Stepping of an instance whose group breaks by chance, before, in or after a step."""

    must_step = False

    def __init__(self, rng: random.Random, device: Device, share: float) -> None:
        self._rng = rng
        self._device = device
        self._share = share
        self.times = RecoveryTimes()

    def link_totals(self) -> dict[int, LinkCount]:
        return {}

    def fail(self) -> None:
        if self._rng.random() < self._share:
            self._device.counts["deaths in the group"] += 1
            self._device.counts["with a step behind"] += len(self._device._begun) > 1
            self._device.forget()
            raise CollectiveError("a peer is lost")

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int = 0) -> Agreement:
        assert queued_prefill >= 0
        self.fail()
        runs = num_tokens > 0 and self._rng.random() < 0.9  # else: an epoch begins
        return Agreement(runs, pauses=num_tokens > 0 and not runs)


@dataclass
class Answer:
    """What a client has got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    ended: tuple[FinishReason | None, int | None] = (None, None)

    def take(self, delta: Delta) -> None:
        assert self.ended[0] is None, "a token behind the last one"
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.ended = delta.finish_reason, delta.stop_reason


@dataclass
class Plan:
    """Everything that a seed decides about a schedule, apart from the order of events."""

    seed: int
    submits: list[Submit] = field(default_factory=list)
    patterns: set[int] = field(default_factory=set)
    num_blocks: int = 14
    max_rows: int = 4
    trouble: float = 0.0
    drafts: bool = False

    @classmethod
    def of(cls, seed: int) -> Plan:
        rng = random.Random(f"plan {seed}")
        plan = cls(seed, num_blocks=rng.choice((14, 14, 17, 22, 60)), max_rows=rng.choice((3, 4, 6)))
        plan.trouble = rng.choice((0.0, 0.0, 0.05))
        plan.drafts = rng.random() < 0.08
        special = rng.choice((0.0, 0.15, 0.5))
        common = [rng.randrange(VOCAB - 1) for _ in range(16)]
        for number in range(1, 1 + rng.randrange(1, 9)):
            prompt = common[: rng.randrange(17)] + [
                rng.randrange(VOCAB - 1) for _ in range(rng.choice((1, 3, 8, 20)))
            ]
            length = rng.choice((1, 2, 5, 12, 20))
            params = SamplingParams(
                max_tokens=length,
                min_tokens=rng.choice((0, 0, min(3, length))),
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=rng.choice(((), tuple(range(0, VOCAB, 7)))),
                logprobs=rng.choice((None, None, 1)),
                prompt_logprobs=rng.choice((None, None, None, 1)),
                presence_penalty=0.5 if rng.random() < special else 0.0,
            )
            if rng.random() < special / 2:
                plan.patterns.add(number)
            priority = rng.choice((0, 0, 0, 1)) if rng.random() < 0.3 else 0
            plan.submits.append(Submit(number, f"r{number}", prompt, params, 0, priority=priority))
        return plan


class Run:
    """One schedule of a plan, with or without steps scheduled ahead."""

    def __init__(self, plan: Plan, *, ahead: bool, undisturbed: bool = False) -> None:
        self.plan = plan
        self.ahead = ahead
        self.undisturbed = undisturbed
        self.rng = random.Random(f"run {plan.seed} {ahead}")
        self.answers: dict[int, Answer] = {}
        self.aborted: set[int] = set()
        self.counts: Counter[str] = Counter()
        self._written: deque[tuple[int, list[int]]] = deque()
        self._arrivals = 0
        self._begin_instance()

    def _begin_instance(self) -> None:
        plan = self.plan
        self.device = Device(
            self.rng, ahead=self.ahead, max_rows=plan.max_rows, checks_reads=not plan.trouble
        )
        self.device.counts = self.counts
        config = EngineConfig(
            cache=CacheConfig(block_size=SIZE),
            scheduler=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=plan.max_rows),
        )
        executor: Any = self.device
        speculation: Any = Oracle(self._follows, 0.8, seed=plan.seed) if plan.drafts else None
        self.core = EngineCore(
            config, INFO, executor, num_blocks=plan.num_blocks, max_model_len=LONGEST, speculation=speculation
        )
        if plan.trouble and not self.undisturbed:
            stepping: Any = Troubled(self.rng, self.device, plan.trouble)
            self.device.trouble = stepping.fail
            self.core.stepping = stepping
        self._written.clear()

    @staticmethod
    def _follows(tokens: list[int], count: int) -> list[int]:
        """Tokens that follow a text, of which some may be wrong."""
        found: list[int] = []
        for _ in range(count):
            found.append(next_token([*tokens, *found]))
        return found

    # ---- events

    def run(self) -> None:
        """Everything of the plan, to the end."""
        left = deque(self.plan.submits)
        turns = 0
        while left or self.core.has_work or self._written:
            turns += 1
            assert turns < 5000, "it does not come to an end"
            if left and (self.undisturbed or self.rng.random() < 0.4):
                submit = left.popleft()
                self.answers[submit.request] = Answer()
                self._submit(submit)
            if not self.undisturbed:
                self._disturb()
            self._step()
            self._check()
        self.counts["preemptions"] += self.core.scheduler.counters().preemptions
        assert self.core.reports.report(0, 0).blocks_used == 0
        legitimate = self._legitimate_names()
        assert all(name in legitimate for name in self.core.pool.known), "a name of no context"

    def _submit(self, submit: Submit) -> None:
        self._arrivals += 1
        answer = self.answers[submit.request]
        request = from_submit(
            msgspec.structs.replace(submit, output_ids=answer.tokens[:]),
            PEER,
            arrival=self._arrivals,
            eos_ids=INFO.eos_token_ids,
            max_model_len=LONGEST,
        )
        if submit.request in self.plan.patterns:
            pattern: Any = Pattern(answer.tokens)
            request.grammar = pattern
        assert self.core.scheduler.problem_with(request) is None
        self.core.scheduler.add(request)
        self.counts["requests that wait"] += needs_tokens(request)

    def _disturb(self) -> None:
        going = [number for number, answer in self.answers.items() if self._goes(number, answer)]
        chance = self.rng.random()
        if chance < 0.03 and going:
            number = self.rng.choice(going)
            self.core.abort(PEER, [number])
            self.aborted.add(number)
        elif chance < 0.05 and going:
            self._move(self.rng.choice(going))
        elif chance < 0.06:
            self._die()
        elif chance < 0.16:
            self._write_beside()
        if self._written and self._written[0][0] <= self.counts["steps"]:
            _, blocks = self._written.popleft()
            assert self.device.is_written(blocks), "a step wrote to a block that was not its own"
            self.core.pool.release(blocks)

    def _goes(self, number: int, answer: Answer) -> bool:
        return answer.ended[0] is None and number not in self.aborted

    def _move(self, number: int) -> None:
        """Hand a request over once it is in no step; here to the same instance."""
        request = self.core.scheduler.queues.find((PEER, number))
        assert request is not None
        for _ in range(8):
            request.is_asked_for = request.num_in_flight > 0
            if not request.is_asked_for or request.status is not Status.RUNNING:
                break
            self._step()
        else:
            raise AssertionError("it is in each step, so it cannot go")
        if self._goes(number, self.answers[number]):
            assert request.num_computed <= len(request.token_ids)
            self.core.abort(PEER, [number])
            self._submit(self.plan.submits[number - 1])
            self.counts["moves"] += 1

    def _die(self) -> None:
        """The instance ends; its requests go on at another from what was handed out."""
        self.counts["deaths"] += 1
        self.counts["preemptions"] += self.core.scheduler.counters().preemptions
        self._begin_instance()
        for number, answer in self.answers.items():
            if self._goes(number, answer):
                self._submit(self.plan.submits[number - 1])

    def _write_beside(self) -> None:
        """A transfer writes to free blocks, unless steps under way use them."""
        blocks = self.core.pool.take(1)
        if blocks is None:
            return
        if not self.core.scheduler.blocks_in_flight().isdisjoint(blocks):
            self.counts["blocks of steps under way"] += 1
            self.core.pool.release(blocks)
            return
        self.device.write(blocks)
        self._written.append((self.counts["steps"] + 3, blocks))

    def _step(self) -> None:
        self.counts["steps"] += 1
        with contextlib.suppress(CollectiveError):
            for delta in self.core.step().get(PEER, []):
                if delta.request not in self.aborted:
                    self.answers[delta.request].take(delta)

    # ---- what must hold

    def _check(self) -> None:
        """Names are of whole blocks whose tokens are known."""
        queues = self.core.scheduler.queues
        assert queues.num_waiting_tokens >= 0
        for request in queues.running:
            assert request.num_named * SIZE <= min(request.num_computed, len(request.token_ids))
            assert all(name == _name(request, index) for index, name in enumerate(request.hashes))
        self.counts["surplus rows"] += sum(
            request.status is Status.FINISHED
            for under_way in self.core.scheduler._in_flight
            for request in under_way.requests
        )

    def _legitimate_names(self) -> set[bytes]:
        """Names of all whole blocks of the contexts that there were."""
        found = set()
        for submit in self.plan.submits:
            ids = [*submit.prompt_ids, *self.answers[submit.request].tokens]
            parent = None
            for start in range(0, len(ids) // SIZE * SIZE, SIZE):
                parent = hash_block(parent, ids[start : start + SIZE])
                found.add(parent)
        return found


def _logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -token / 7, 1 + token % 3, [], [])


def _name(request: Request, index: int) -> bytes:
    parent = request.hashes[index - 1] if index else None
    return hash_block(parent, request.token_ids[index * SIZE : (index + 1) * SIZE])


def compare(seed: int) -> Counter[str]:
    """Compare the answers of a seed's schedule with those of a run without steps ahead.

    Returns what happened.
    """
    plan = Plan.of(seed)
    undisturbed, found = Run(plan, ahead=False, undisturbed=True), Run(plan, ahead=True)
    undisturbed.run()
    found.run()
    for number, expected in undisturbed.answers.items():
        answer = found.answers[number]
        if number in found.aborted:
            assert answer.tokens == expected.tokens[: len(answer.tokens)], f"request {number}"
            continue
        if found.counts["deaths"] or found.counts["moves"]:  # those of the prompt may not come twice
            answer.prompt_logprobs = expected.prompt_logprobs
        assert answer == expected, f"request {number}"
    return found.counts
