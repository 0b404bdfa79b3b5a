"""Feeds steps to a model runner by hand: the least that stands in for a scheduler."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from engine.messages import TokenLogprobs
from engine.runner import ModelRunner
from engine.sampling import SamplingParams
from engine.step import Admit, Row, Sampled, Step


@dataclass
class Driven:
    """A request in a slot: what went in and what came out."""

    slot: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    computed: int = 0
    num_blocks: int = 0
    admitted: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


class Driver:
    """Blocks are handed out in random order and never returned."""

    def __init__(self, runner: ModelRunner, block_size: int, num_blocks: int, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = block_size
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.slots: list[Driven] = []
        self.steps: list[Step] = []

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        output: tuple[int, ...] = (),
        slot: int | None = None,
    ) -> Driven:
        request = Driven(
            len(self.slots) if slot is None else slot, [*prompt, *output], len(prompt), params, seed
        )
        self.slots.append(request)
        return request

    def step(self, counts: list[tuple[Driven, int]], stop_ids: tuple[int, ...] = ()) -> list[Sampled]:
        """Compute the next ``count`` tokens of each request, as one step."""
        admits, rows = [], []
        for request, count in sorted(counts, key=lambda pair: pair[1] > 1):
            if not request.admitted:
                request.admitted = True
                admits.append(
                    Admit(
                        request.slot,
                        list(request.token_ids),
                        request.num_prompt,
                        request.params,
                        request.seed,
                        stop_ids,
                    )
                )
            end = request.computed + count
            needed = -(-end // self.block_size) - request.num_blocks
            blocks = [self.free.pop() for _ in range(max(needed, 0))]
            request.num_blocks += len(blocks)
            sample = end == len(request.token_ids)
            rows.append(Row(request.slot, request.computed, count, blocks, sample))
        step = Step(admits, rows)
        self.steps.append(step)
        sampled = self.runner.run(step).sampled
        for request, row, outcome in zip(
            (next(each for each in self.slots if each.slot == row.slot) for row in rows),
            rows,
            sampled,
            strict=True,
        ):
            assert outcome.slot == row.slot
            request.computed += row.count
            if outcome.token_id is not None:
                request.token_ids.append(outcome.token_id)
            if outcome.logprobs is not None:
                request.logprobs.append(outcome.logprobs)
            request.prompt_logprobs += outcome.prompt_logprobs or []
        return sampled

    def generate(
        self, requests: list[Driven], num_new: int, *, chunk: int = 1 << 30, together: bool = True
    ) -> None:
        """Run until each request has ``num_new`` more tokens; at most ``chunk`` tokens of a request per step.

        Without ``together`` one request is in prefill at a time, beside the decodes of those before it.
        """
        wanted = {request.slot: len(request.token_ids) + num_new for request in requests}
        while True:
            left = [request for request in requests if len(request.token_ids) < wanted[request.slot]]
            if not left:
                return
            counts, prefills = [], 0
            for request in left:
                missing = len(request.token_ids) - request.computed
                if missing > 1:
                    prefills += 1
                    if prefills > 1 and not together:
                        continue
                counts.append((request, min(missing, chunk)))
            self.step(counts)
