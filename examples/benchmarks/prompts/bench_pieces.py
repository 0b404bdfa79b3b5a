#!/usr/bin/env python3
"""Benchmark of prefill chunks in one engine, without HTTP.

    python examples/benchmarks/prompts/bench_pieces.py build/models/dense-small --budgets default 2048
    python examples/benchmarks/prompts/bench_pieces.py build/models/dense-small --offline --modes throughput

Printed are the first token of a long prompt that is alone, and the time from token to token (ITL) of eight
requests that decode while a long prompt is computed; with ``--offline`` the tokens per second of 256 prompts
of 64 to 256 tokens. All settings take turns in one process. Medians come with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

import msgspec

from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore, ModelPlace
from engine.executor.uni import UniExecutor
from engine.messages import Submit
from engine.model.checkpoint import ModelInfo, read_model_info
from engine.sampling import SamplingParams
from parallel.topology import usable_cores

PEER = b"benchmark"
BLOCK = 16
CACHE_TOKENS = 96 * 1024
DECODES, DECODED = 8, 64
OFFLINE, OFFLINE_OUT = 256, 128
Times = dict[int, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 2000, 4000, 8000, 16000])
    parser.add_argument("--budgets", nargs="+", default=["default"], help="tokens of a step, or default")
    parser.add_argument("--modes", nargs="+", default=[""], help="values of --performance-mode")
    parser.add_argument("--beside", type=int, default=16000, help="prompt beside decodes; 0: none")
    parser.add_argument("--offline", action="store_true", help="only tokens per second of many prompts")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    bench = Bench(args.model)
    settings = {f"{budget} {mode}".strip(): (budget, mode) for budget in args.budgets for mode in args.modes}
    found: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        for name, (budget, mode) in settings.items():
            scheduler = scheduler_of(budget, mode)
            measured = bench.offline(scheduler) if args.offline else bench.online(scheduler, args)
            for what, number in measured:
                print(f"{name}: {what} {number:.1f}", file=sys.stderr, flush=True)
                found.setdefault(f"{name}: {what}", []).append(number)
    for what, numbers in found.items():
        print(f"{what:48} {statistics.median(numbers):9.1f}  ({min(numbers):.1f} to {max(numbers):.1f})")


def scheduler_of(budget: str, mode: str) -> SchedulerConfig:
    fields: dict[str, object] = {} if budget == "default" else {"max_num_batched_tokens": int(budget)}
    return msgspec.convert(fields | ({"performance_mode": mode} if mode else {}), SchedulerConfig)


class Bench:
    """A loaded model, served under one setting after the other."""

    def __init__(self, directory: Path) -> None:
        self._info: ModelInfo = read_model_info(directory)
        self._config = EngineConfig(
            model=ModelConfig(model=str(directory), dtype="bfloat16"),
            cache=CacheConfig(block_size=BLOCK),
            device=DeviceConfig(device="cpu"),
        )
        self._executor = UniExecutor(self._config, self._info, usable_cores())
        self._executor.load(lambda _phase: None)
        self._random = random.Random(1)

    def _core(self, scheduler: SchedulerConfig) -> EngineCore:
        self._executor.allocate(CACHE_TOKENS // BLOCK)
        return EngineCore(
            msgspec.structs.replace(self._config, scheduler=scheduler),
            self._info,
            self._executor,
            num_blocks=CACHE_TOKENS // BLOCK,
            max_model_len=self._info.context_length,
            place=ModelPlace(is_native=True),
        )

    def _submit(self, core: EngineCore, number: int, length: int, most: int) -> None:
        ids = [self._random.randrange(3, self._info.vocab_size) for _ in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        refused = core.submit(PEER, Submit(number, str(number), ids, params, 0))
        assert refused is None, refused

    def online(self, scheduler: SchedulerConfig, args: argparse.Namespace) -> Iterator[tuple[str, float]]:
        core = self._core(scheduler)
        self._submit(core, 1, 600, 8)
        drive(core, {1: []})
        for number, length in enumerate(args.lengths, 2):
            began = time.perf_counter()
            self._submit(core, number, length, 1)
            times: Times = {number: []}
            drive(core, times)
            yield f"first token of {length}, ms", 1e3 * (times[number][0] - began)
        if args.beside:
            yield from self._beside(core, args.beside)

    def _beside(self, core: EngineCore, length: int) -> Iterator[tuple[str, float]]:
        times: Times = {100 + index: [] for index in range(DECODES)}
        for number in times:
            self._submit(core, number, 128, 4000)
        while min(map(len, times.values())) < DECODED:
            take(core, times)
        began = time.perf_counter()
        self._submit(core, 99, length, 1)
        long: Times = {99: []}
        while not long[99]:
            take(core, times | long)
        gaps = sorted(
            later - sooner
            for each in times.values()
            for sooner, later in itertools.pairwise(each)
            if later > began
        )
        core.abort(PEER, list(times))
        yield f"ITL p50 beside {length}, ms", 1e3 * statistics.median(gaps)
        yield f"ITL p99 beside {length}, ms", 1e3 * gaps[int(0.99 * len(gaps))]
        yield f"first token of {length} beside, ms", 1e3 * (long[99][0] - began)

    def offline(self, scheduler: SchedulerConfig) -> Iterator[tuple[str, float]]:
        core = self._core(scheduler)
        lengths = random.Random(2)
        self._submit(core, 1, 600, 8)
        drive(core, {1: []})
        times: Times = {2 + index: [] for index in range(OFFLINE)}
        began = time.perf_counter()
        for number in times:
            self._submit(core, number, lengths.randint(64, 256), OFFLINE_OUT)
        drive(core, times)
        yield "tokens/s", OFFLINE * OFFLINE_OUT / (time.perf_counter() - began)


def drive(core: EngineCore, times: Times) -> None:
    while core.has_work:
        take(core, times)


def take(core: EngineCore, times: Times) -> None:
    """One step; notes when each request's tokens came."""
    outgoing = core.step().get(PEER)
    now = time.perf_counter()
    for delta in outgoing or ():
        times[delta.request] += [now] * len(delta.token_ids)


if __name__ == "__main__":
    main()
