#!/usr/bin/env python3
"""Benchmark of ``lockstep verify``: an answer drawn again, in prefills of prompt and answer.

    python examples/benchmarks/prompts/bench_verify.py
    python examples/benchmarks/prompts/bench_verify.py --model DIR --prompt 500 --answer 1000 --most 1.3

``prefill`` computes prompt and answer as one prompt, with logits of its last token alone. ``scores`` does the
same with the log-probability of each token. ``verify`` draws the answer again from its recorded tokens, with
log-probabilities, and compares the tokens. It needs logits of the answer, which a prefill does not:
``logits`` is the part of ``verify`` in the model, the least that any check takes. Each number is the least of
several runs in turn; with one thread it is CPU time, else time that passed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from engine.config import SHIPPED_MODEL, CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from engine.messages import Delta, Submit
from engine.sampling import SamplingParams
from engine.verification.scorer import Recorded, Scorer
from parallel.topology import usable_cores

SEED = 7


class Answer:
    """A prompt and the model's answer to it, to be computed in several ways."""

    def __init__(self, scorer: Scorer, num_prompt: int, num_tokens: int) -> None:
        chance = random.Random(1)
        self._scorer = scorer
        self._params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=0)
        self._prompt = [chance.randrange(100, scorer.vocab_size) for _ in range(num_prompt)]
        self._ids: list[int] = []
        self._ids = self._computed(self._prompt, self._params)

    def _computed(self, ids: Sequence[int], params: SamplingParams, answer: Sequence[int] = ()) -> list[int]:
        """Tokens that come behind ``ids``; nothing is taken from the prefix cache."""
        found: list[int] = []

        def take(_: int, delta: Delta) -> bool:
            found.extend(delta.token_ids)
            return False

        submit = Submit(0, "bench", list(ids), params, SEED, cache_salt=uuid.uuid4().hex)
        assert self._scorer.compute([Recorded(submit, answer)], take) == {}
        return found

    def prefill(self) -> None:
        self._computed([*self._prompt, *self._ids], SamplingParams(temperature=0.0, max_tokens=1))

    def scores(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        self._computed([*self._prompt, *self._ids], params)

    def verify(self) -> None:
        assert self._computed(self._prompt, self._params, self._ids) == self._ids


class ForwardTime:
    """Time of an executor's forward passes alone, sampling left out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        from engine.compute.runner import ModelRunner

        forward = ModelRunner._forward

        def timed(runner: ModelRunner, *arguments: object) -> object:
            began = clock()
            try:
                return forward(runner, *arguments)  # type: ignore[arg-type]
            finally:
                self.seconds += clock() - began

        ModelRunner._forward = timed  # type: ignore[assignment,method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=SHIPPED_MODEL)
    parser.add_argument("--prompt", type=int, default=500, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=1000, help="tokens of the answer")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--most", type=float, help="fail where verify takes more than so many prefills")
    arguments = parser.parse_args()
    length = arguments.prompt + arguments.answer + 16
    config = EngineConfig(
        model=ModelConfig(model=arguments.model, dtype="bfloat16", max_model_len=length),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 30),
        device=DeviceConfig(device="cpu"),
    )
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    forward = ForwardTime(clock)
    with Scorer(config, arguments.threads) as scorer:
        answer = Answer(scorer, arguments.prompt, arguments.answer)
        least = dict.fromkeys(("prefill", "scores", "verify", "logits"), float("inf"))
        for _ in range(arguments.runs):
            for name, run in (
                ("prefill", answer.prefill),
                ("scores", answer.scores),
                ("verify", answer.verify),
            ):
                forward.seconds, began = 0.0, clock()
                run()
                least[name] = min(least[name], clock() - began)
            least["logits"] = min(least["logits"], forward.seconds)
    print(f"{arguments.model}, {arguments.prompt} + {arguments.answer} tokens, {arguments.threads} threads")
    for name, seconds in least.items():
        print(f"{name:8} {seconds * 1e3:9.1f} ms {seconds / least['prefill']:6.2f} prefills")
    return int(arguments.most is not None and least["verify"] > arguments.most * least["prefill"])


if __name__ == "__main__":
    sys.exit(main())
