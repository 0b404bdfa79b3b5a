#!/usr/bin/env python3
r"""Benchmark of structured outputs: masks per step, and compiling schemas.

    python examples/benchmarks/bench_structured.py
    python examples/benchmarks/bench_structured.py --model /path/to/model --requests 1 8 \
        --output-json structured.json

Steps are those of a real engine on a model, in one process, with so many requests at once: every request
follows a JSON schema in one run, and none does in the other. ``mask`` is the time in which the masks of a
step are made, ``apply`` the time in which the sampler applies them, ``take`` the time in which grammars go on
behind the new tokens; ``step`` and ``free step`` are whole steps with and without grammars. Compiling is
timed for 200 schemas, each for the first time, with the model's tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from engine.compute.sampler import backend_on
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor.uni import UniExecutor
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from engine.model.finding import find_model
from engine.sampling import SamplingParams
from engine.scheduling.grammar import Grammar, compile_grammar, load_vocabulary
from router.structured_config import StructuredOutputsConfig
from router.tools.bench.report import machine, percentile
from router.turns.structured import ANSWER, json_body, text_of
from tests.mesh.clients.schemas import schema

BLOCKS = 4000
RECORD = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "people": {
            "type": "array",
            "minItems": 50,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 30},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "rank": {"enum": ["captain", "colonel", "none"]},
                },
                "required": ["name", "age", "rank"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["people", "title"],
    "additionalProperties": False,
}
"""A schema whose answers take longer than the steps that are timed."""


class Timed:
    """Adds up the time of calls to a function that it wraps."""

    def __init__(self, holder: Any, name: str) -> None:
        self.seconds = 0.0
        original: Callable[..., Any] = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(holder, name, timed)


def run(core: EngineCore, count: int, steps: int, grammar: str | None) -> list[float]:
    """Seconds of each step in which all of so many requests get a token."""
    for number in range(count):
        params = SamplingParams(max_tokens=steps + 50, ignore_eos=True, grammar=grammar)
        prompt = [17 + (7 * number + place) % 300 for place in range(20)]
        refused = core.submit(b"bench", Submit(number, str(number), prompt, params, seed=number))
        assert refused is None, refused
    while len(core.grammars):
        refusals = core.take_ready()
        assert not refusals, refusals
        time.sleep(0.001)
    core.take_ready()
    times = []
    for step in range(steps + 5):
        began = time.perf_counter()
        core.step()
        if step >= 5:  # prompts, and what is made once
            times.append(time.perf_counter() - began)
    core.abort_all(b"bench")
    while core.has_work:
        core.step()
    return times


def compile_times(directory: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> dict[str, float]:
    began = time.perf_counter()
    vocabulary = load_vocabulary(directory, vocab_size, eos_ids)
    loading = time.perf_counter() - began
    times = []
    for index in range(200):
        text = text_of({ANSWER: json_body(schema(index), StructuredOutputsConfig())})
        began = time.perf_counter()
        Grammar(compile_grammar(text, vocabulary).deep_copy(), vocabulary)
        times.append((time.perf_counter() - began) * 1e3)
    return {
        "tokenizer_s": loading,
        "p50_ms": statistics.median(times),
        "p99_ms": percentile(sorted(times), 99),
        "max_ms": max(times),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="Directory; unset: the shipped model.")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    directory = find_model(args.model)
    info = read_model_info(directory)
    config = EngineConfig(
        model=ModelConfig(model=str(directory)),
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=max(args.requests)),
    )
    executor = UniExecutor(config, info, len(os.sched_getaffinity(0)))
    executor.load(lambda _phase: None)
    executor.allocate(BLOCKS)
    limit = info.context_length
    core = EngineCore(config, info, executor, num_blocks=BLOCKS, max_model_len=limit)
    grammar = text_of({ANSWER: json_body(RECORD, StructuredOutputsConfig())})
    parts = {
        "mask": Timed(Grammar, "mask"),
        "take": Timed(Grammar, "take"),
        "apply": Timed(type(backend_on(torch.device("cpu"))), "mask"),
    }
    rows = []
    print(
        "requests  step ms  free step ms   mask ms   take ms  apply ms   (medians of steps; means of parts)"
    )
    for count in args.requests:
        free = run(core, count, args.steps, None)
        for part in parts.values():
            part.seconds = 0.0
        bound = run(core, count, args.steps, grammar)
        row = {
            "requests": count,
            "step_ms": statistics.median(bound) * 1e3,
            "free_step_ms": statistics.median(free) * 1e3,
        }
        row |= {f"{name}_ms": part.seconds / (args.steps + 5) * 1e3 for name, part in parts.items()}
        rows.append(row)
        print(
            f"{count:8d} {row['step_ms']:8.2f} {row['free_step_ms']:13.2f} {row['mask_ms']:9.3f} "
            f"{row['take_ms']:9.3f} {row['apply_ms']:9.3f}"
        )
    compiled = compile_times(directory, info.vocab_size, info.eos_token_ids)
    print(
        f"compiling 200 schemas: p50 {compiled['p50_ms']:.2f} ms, p99 {compiled['p99_ms']:.2f} ms, "
        f"most {compiled['max_ms']:.2f} ms; the tokenizer of {info.vocab_size} tokens took "
        f"{compiled['tokenizer_s']:.2f} s"
    )
    if args.output_json:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        found = {
            "machine": machine(),
            "model": str(args.model or "shipped"),
            "steps": rows,
            "compile": compiled,
        }
        args.output_json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
