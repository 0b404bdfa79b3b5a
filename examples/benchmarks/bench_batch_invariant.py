#!/usr/bin/env python3
"""Benchmark of ``--batch-invariant``: CPU time of a step with and without it, on torch's operators.

    python examples/benchmarks/bench_batch_invariant.py
    python examples/benchmarks/bench_batch_invariant.py --models tiny --rows 1 16 --steps 50

The models have Gemma 3's shape and random weights, in bfloat16. Printed are milliseconds of CPU time of a
decode step of so many requests, and tokens per CPU second while their prompts are computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from router.tools.bench.report import machine

PROMPT = 32
BLOCK_SIZE = 16
ROUTER = b"router"
MODELS = {
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6},
    "0.5b": {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 18},
}
SHARED = {
    "vocab_size": 32768,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 4096,
}


def executor_of(directory: Path, threads: int, *, batch_invariant: bool) -> Any:
    """A loaded model of random weights."""
    from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
    from engine.executor.uni import UniExecutor
    from engine.model.checkpoint import read_model_info

    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="bfloat16", load_format="dummy"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        device=DeviceConfig(device="cpu", batch_invariant=batch_invariant),
    )
    executor = UniExecutor(config, read_model_info(directory, weights=False), threads)
    executor.load(lambda _phase: None)
    executor.allocate(8)
    return executor


def measure(executor: Any, directory: Path, rows: int, steps: int) -> tuple[float, float]:
    """CPU milliseconds of a decode step of so many rows; prompt tokens per CPU second."""
    from engine.config import CacheConfig, EngineConfig, SchedulerConfig
    from engine.core import EngineCore
    from engine.messages import Submit
    from engine.model.checkpoint import read_model_info
    from engine.sampling import SamplingParams

    num_blocks = rows * ((PROMPT + steps) // BLOCK_SIZE + 2)
    core = EngineCore(
        EngineConfig(
            cache=CacheConfig(block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=64),
        ),
        read_model_info(directory, weights=False),
        executor,
        num_blocks=num_blocks,
        max_model_len=4096,
    )
    executor.allocate(num_blocks)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    for number in range(rows):
        prompt = [(number * 31 + place * 7) % 4000 + 3 for place in range(PROMPT)]
        core.submit(ROUTER, Submit(number, str(number), prompt, params, seed=number))
    begun: set[int] = set()
    began = time.process_time()
    while len(begun) < rows:
        begun.update(delta.request for delta in core.step().get(ROUTER, []))
    prefill = time.process_time() - began
    times = []
    while core.has_work and len(times) < steps:
        began = time.process_time()
        core.step()
        times.append(time.process_time() - began)
    core.abort_all(ROUTER)
    return statistics.median(times) * 1000, rows * PROMPT / prefill


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64], help="requests at once")
    parser.add_argument("--steps", type=int, default=8, help="decode steps to measure")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the numbers")
    options = parser.parse_args()

    import transformers

    results = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            config = transformers.Gemma3TextConfig(**SHARED | MODELS[name])
            config.architectures = ["Gemma3ForCausalLM"]
            config.save_pretrained(directory)
            executors = {
                flag: executor_of(directory, options.threads, batch_invariant=flag) for flag in (False, True)
            }
            for rows in options.rows:
                found = {
                    flag: measure(executor, directory, rows, options.steps)
                    for flag, executor in executors.items()
                }
                (plain, plain_prefill), (fixed, fixed_prefill) = found[False], found[True]
                print(
                    f"{name:>5} {rows:3} rows: {plain:8.1f} ms a step, {fixed:8.1f} with --batch-invariant "
                    f"(x {fixed / plain:.2f}); "
                    f"prompts {plain_prefill:7.0f} and {fixed_prefill:7.0f} tokens/s "
                    f"(x {plain_prefill / fixed_prefill:.2f})",
                    flush=True,
                )
                results.append(
                    {
                        "model": name,
                        "rows": rows,
                        "decode_ms": {"plain": plain, "batch_invariant": fixed},
                        "prompt_tokens_per_s": {"plain": plain_prefill, "batch_invariant": fixed_prefill},
                    }
                )
    if options.output is not None:
        measured = {"machine": machine(), "threads": options.threads, "results": results}
        options.output.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
