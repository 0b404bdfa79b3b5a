"""Steps fed to a model runner by hand, in place of a scheduler."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from engine.compute.runner import ModelRunner
from engine.messages import TokenLogprobs
from engine.sampling import SamplingParams
from engine.step import Admit, Step, StepResult


@dataclass
class Driven:
    """A request in a slot: its parameters and its outputs."""

    slot: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    adapter: int = 0
    adapter_digest: str = ""
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
        adapter: tuple[int, str] = (0, ""),
    ) -> Driven:
        slot = len(self.slots) if slot is None else slot
        request = Driven(slot, [*prompt, *output], len(prompt), params, seed, *adapter)
        self.slots.append(request)
        return request

    def step(self, counts: list[tuple[Driven, int]], stop_ids: tuple[int, ...] = ()) -> StepResult:
        """Compute the next ``count`` tokens of each request, as one step."""
        rows = sorted(counts, key=lambda pair: pair[1] > 1)
        admits, new_blocks, partial = [], {}, []
        for index, (request, count) in enumerate(rows):
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
                        request.adapter,
                        request.adapter_digest,
                    )
                )
            end = request.computed + count
            needed = -(-end // self.block_size) - request.num_blocks
            blocks = [self.free.pop() for _ in range(max(needed, 0))]
            request.num_blocks += len(blocks)
            if blocks:
                new_blocks[index] = blocks
            if end < len(request.token_ids):
                partial.append(index)
        step = Step(
            admits,
            [request.slot for request, _ in rows],
            [request.computed for request, _ in rows],
            [count for _, count in rows],
            new_blocks,
            partial,
        )
        self.steps.append(step)
        result = self.runner.run(step)
        for index, ((request, count), token) in enumerate(zip(rows, result.tokens, strict=True)):
            request.computed += count
            if token is not None:
                request.token_ids.append(token)
            if index in result.logprobs:
                request.logprobs.append(result.logprobs[index])
            request.prompt_logprobs += result.prompt_logprobs.get(index, [])
        return result

    def generate(
        self, requests: list[Driven], num_new: int, *, chunk: int = 1 << 30, together: bool = True
    ) -> None:
        """Run until each request has ``num_new`` more tokens.

        At most ``chunk`` tokens of a request per step.

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
