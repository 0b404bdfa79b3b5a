"""A mesh without instances, which gives the tokens that a test scripts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.messages import ExpertBalance, Role
from coordinator.numerics import Numerics
from engine.messages import Delta, FinishReason, InstanceReport, TokenLogprobs
from router.mesh import MeshError, NumericsSwitch, Prompt, ServedModel, TokenSink, WeightSpan

Script = Callable[[Prompt], Sequence[Delta]]


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Made up, but consistent: the token stands at rank 2 behind its successor."""
    top = [token_id + 1, token_id, token_id + 2][:num_top]
    return TokenLogprobs(token_id, -1.5, 2, top, [-0.5, -1.5, -2.5][:num_top])


def saying(token_ids: Sequence[int], reason: FinishReason = FinishReason.LENGTH) -> Script:
    """One delta per token, as many as asked for; log-probabilities when asked for."""

    def script(prompt: Prompt) -> list[Delta]:
        params = prompt.params
        count = min(len(token_ids), params.max_tokens or len(token_ids))
        deltas = []
        for position, token_id in enumerate(token_ids[:count]):
            is_last = position == count - 1
            wants_prompt = position == 0 and params.prompt_logprobs is not None
            deltas.append(
                Delta(
                    request=1,
                    token_ids=[token_id],
                    finish_reason=(reason if count == len(token_ids) else FinishReason.LENGTH)
                    if is_last
                    else None,
                    logprobs=None if params.logprobs is None else [logprobs_of(token_id, params.logprobs)],
                    prompt_logprobs=[
                        None,
                        *(logprobs_of(id, params.prompt_logprobs or 0) for id in prompt.prompt_ids[1:]),
                    ]
                    if wants_prompt
                    else None,
                    num_cached_tokens=3 if position == 0 else 0,
                )
            )
        return deltas

    return script


def failing(message: str, after: Sequence[int] = ()) -> Script:
    """Tokens, then an error."""

    def script(prompt: Prompt) -> list[Delta]:
        tokens = [Delta(1, [token_id]) for token_id in after]
        return [*tokens, Delta(1, [], FinishReason.ERROR, error=message)]

    return script


class FakeGeneration:
    """Follows the script; without a last delta it hangs until it is closed."""

    def __init__(self, mesh: FakeMesh, prompt: Prompt, deltas: Sequence[Delta]) -> None:
        self._mesh = mesh
        self._deltas = deltas
        self.prompt = prompt
        self.taken = 0
        """Number of deltas sent to the sink that took over the generation."""
        self._sink: TokenSink | None = None
        self.is_closed = False
        self.has_ended = False

    @property
    def rank(self) -> int | None:
        return None if self.has_ended else self.prompt.rank or 0

    @property
    def fingerprint(self) -> str | None:
        return self._mesh.fingerprints.get(self.prompt.sample_index)

    @property
    def first_class(self) -> Numerics | None:
        return self._mesh.first_classes.get(self.prompt.sample_index)

    @property
    def numerics_changes(self) -> Sequence[NumericsSwitch]:
        return self._mesh.changes.get(self.prompt.sample_index, ())

    @property
    def weight_spans(self) -> Sequence[WeightSpan]:
        return self._mesh.weight_spans.get(self.prompt.sample_index, ())

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._deltas:
            await asyncio.sleep(self._mesh.delay)
            self.has_ended = delta.finish_reason is not None
            if self._is_taken(delta):
                self.taken += 1
                continue
            yield delta
            if delta.finish_reason is not None:
                return
        await asyncio.Event().wait()

    def _is_taken(self, delta: Delta) -> bool:
        if self._sink is None:
            return False
        if delta.is_single:
            return self._sink.take_token(delta.token_ids[0], time.perf_counter())
        return self._sink.take(delta)

    def hand_over(self, sink: TokenSink) -> None:
        self._sink = sink

    def close(self) -> None:
        self.is_closed = True
        self._sink = None


@dataclass
class Facts:
    """Answers to the questions of :class:`router.mesh.MeshFacts`."""

    reports: Mapping[int, InstanceReport] = field(default_factory=dict)
    epoch: int | None = None
    block_size: int | None = None
    instances: Mapping[str, int] = field(default_factory=dict)
    refused_peers: Mapping[str, int] = field(default_factory=dict)
    balance: ExpertBalance | None = None
    choices: Mapping[str, int] = field(default_factory=dict)
    numerics_changes: Mapping[str, int] = field(default_factory=dict)
    shadow_checks: Mapping[str, int] = field(default_factory=dict)
    shadow_differences: Mapping[str, int] = field(default_factory=dict)
    numerics: Mapping[Numerics, list[int]] = field(default_factory=dict)
    roles: Mapping[int, Role] = field(default_factory=dict)


class FakeMesh:
    """A :class:`router.mesh.Mesh`. ``script`` may be changed at any time."""

    def __init__(self, model: ServedModel | None, script: Script, facts: Facts | None = None) -> None:
        self.model = model
        self._facts = facts or Facts()
        self.healthy = True
        self.script = script
        self.fingerprints: dict[int, str] = {}
        self.first_classes: dict[int, Numerics] = {}
        """Numerics class of the instance that computes each sample of a prompt."""
        self.changes: dict[int, list[NumericsSwitch]] = {}
        self.weight_spans: dict[int, list[WeightSpan]] = {}
        """Changes of class, likewise."""
        self.delay = 0.0
        self.refusal: MeshError | None = None
        self.refuse_after = 0
        """How many samples are taken before ``refusal``."""
        self.generations: list[FakeGeneration] = []

    @property
    def prompts(self) -> list[Prompt]:
        return [generation.prompt for generation in self.generations]

    @property
    def num_open(self) -> int:
        return sum(not generation.is_closed for generation in self.generations)

    def reset(self, script: Script) -> None:
        self.script, self.delay, self.refusal, self.refuse_after = script, 0.0, None, 0
        self.healthy = True
        self.fingerprints.clear()
        self.first_classes.clear()
        self.changes.clear()
        self.weight_spans.clear()
        self.generations.clear()

    def reports(self) -> Mapping[int, InstanceReport]:
        return self._facts.reports

    def epoch(self) -> int | None:
        return self._facts.epoch

    def block_size(self) -> int | None:
        return self._facts.block_size

    def instances_by_state(self) -> Mapping[str, int]:
        return self._facts.instances

    def numerics(self) -> Mapping[Numerics, list[int]]:
        return self._facts.numerics

    def roles(self) -> Mapping[int, Role]:
        return self._facts.roles

    def balance(self) -> ExpertBalance | None:
        return self._facts.balance

    def refused_peers(self) -> Mapping[str, int]:
        return self._facts.refused_peers

    def choices(self) -> Mapping[str, int]:
        return self._facts.choices

    def numerics_changes(self) -> Mapping[str, int]:
        return self._facts.numerics_changes

    def shadow_checks(self) -> Mapping[str, int]:
        return self._facts.shadow_checks

    def shadow_differences(self) -> Mapping[str, int]:
        return self._facts.shadow_differences

    def check_room(self) -> None:
        return

    def generate(self, prompt: Prompt) -> FakeGeneration:
        if self.refusal is not None and len(self.generations) >= self.refuse_after:
            raise self.refusal
        generation = FakeGeneration(self, prompt, self.script(prompt))
        self.generations.append(generation)
        return generation
