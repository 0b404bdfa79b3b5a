#!/usr/bin/env python3
"""What new weights cost running requests: steps beside their preparation, and the switch.

    python -m examples.rl.bench_new_weights
    python -m examples.rl.bench_new_weights --rows 8 --rounds 5 --seconds 4

One instance decodes in one process. In turn, for a few seconds each: nothing else happens; new weights are
prepared again and again as they are served (one thread, an eighth of a core while steps run);
the same unbounded, as it was at first (all threads, without pauses). Times are of the wall clock, so
other load shows in all three alike.

What running requests lose is measured in pairs: slices of a tenth of a second in which a preparation goes on,
and slices between them in which it stands still. So both have the same neighbours on a busy machine, and all
steps count, also those that the preparation held up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from engine.config import SHIPPED_MODEL, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor.uni import UniExecutor
from engine.host import background
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from engine.model.finding import MODELS_DIRECTORY, find_model
from engine.sampling import SamplingParams
from engine.weight_versions import shard_weights
from engine.weight_versions.contract import WeightsSuperseded

ROUTER = b"router"
PROMPT, BLOCK, LONGEST = 64, 16, 1900
LONGEST_WAIT = 120.0
"""Seconds for one preparation beside steps."""
SETTLE = 0.02
"""Seconds of a slice that do not count: part of the preparation may still run."""
REST = 0.01
"""Seconds without steps before each slice.

Linux stops processes of real-time priority (``chrt``) that take over 95 % of a core.
"""
ARMS = ("alone", "bounded", "unbounded")


class Decoding:
    """Requests of one instance that decode without end."""

    def __init__(self, model: Path, rows: int, threads: int, dtype: str) -> None:
        self._info, self._rows, self._number = read_model_info(model), rows, 0
        blocks = rows * (LONGEST // BLOCK + 4)
        self._config = EngineConfig(
            model=ModelConfig(model=str(model), dtype=dtype),  # type: ignore[arg-type]
            cache=CacheConfig(block_size=BLOCK),
            scheduler=SchedulerConfig(max_num_batched_tokens=1024, max_num_seqs=max(rows, 8)),
        )
        self.executor = UniExecutor(self._config, self._info, threads)
        self.executor.load(lambda _phase: None)
        self.executor.allocate(blocks)
        self._core = EngineCore(
            self._config, self._info, self.executor, num_blocks=blocks, max_model_len=LONGEST + PROMPT
        )

    def steps(self, seconds: float) -> list[float]:
        """Seconds of each decode step."""
        times, ends = [], time.perf_counter() + seconds
        while (began := time.perf_counter()) < ends:
            if not self._core.has_work:
                self._begin()
                began = time.perf_counter()
            self._core.step()
            times.append(time.perf_counter() - began)
        return times

    def _begin(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=LONGEST, ignore_eos=True)
        for _ in range(self._rows):
            self._number += 1
            prompt = [(self._number * 31 + place * 7) % 4000 + 3 for place in range(PROMPT)]
            self._core.submit(ROUTER, Submit(self._number, str(self._number), prompt, params, seed=1))
        for _ in range(3):
            self._core.step()


@contextmanager
def preparing(decoding: Decoding, model: Path, *, bounded: bool) -> Iterator[list[float]]:
    """New weights are prepared again and again meanwhile; gives the seconds of each preparation."""
    taken: list[float] = []
    ends = threading.Event()
    weights = decoding.executor.new_weights

    def prepare() -> None:
        while not ends.is_set():
            began = time.perf_counter()
            try:
                weights.prepare(str(model), ends.is_set)
            except WeightsSuperseded:
                return
            taken.append(time.perf_counter() - began)
        weights.discard()

    def unbounded(num_steps: Callable[[], int]) -> background.Pace:
        return background.Pace(num_steps, share=1.0)

    with ExitStack() as patched:
        if not bounded:
            patched.enter_context(patch.object(shard_weights, "Pace", unbounded))
            patched.enter_context(patch.object(shard_weights, "compute_with"))
        thread = threading.Thread(target=prepare)
        thread.start()
        try:
            yield taken
        finally:
            ends.set()
            thread.join()


class GatedPace(background.Pace):
    """Pace of a preparation that stands still while a gate is closed."""

    gate = threading.Event()

    def rest(self) -> None:
        super().rest()
        self.gate.wait()


class Pair(NamedTuple):
    """Steps of two slices of time, one with a preparation under way, one without."""

    beside: list[float]
    alone: list[float]

    @property
    def loss(self) -> float:
        """Share of its speed that the instance loses."""
        return 1 - statistics.fmean(self.alone) / statistics.fmean(self.beside)


def pairs(decoding: Decoding, model: Path, count: int, seconds: float) -> list[Pair]:
    """Slices in turn, in pairs whose order changes."""
    found = []

    def slice_of(*, beside: bool) -> list[float]:
        (GatedPace.gate.set if beside else GatedPace.gate.clear)()
        time.sleep(REST)
        decoding.steps(SETTLE)
        return decoding.steps(seconds)

    GatedPace.gate.set()
    with patch.object(shard_weights, "Pace", GatedPace), preparing(decoding, model, bounded=True):
        for number in range(count):
            first = bool(number % 2)
            one, other = slice_of(beside=first), slice_of(beside=not first)
            found.append(Pair(one, other) if first else Pair(other, one))
        GatedPace.gate.set()
    return found


def text_of(paired: list[Pair]) -> str:
    """What pairs of slices come to."""
    low, middle, high = statistics.quantiles([pair.loss for pair in paired], n=4)
    alone = [step for pair in paired for step in pair.alone]
    beside = [step for pair in paired for step in pair.beside]
    mean, other = statistics.fmean(alone), statistics.fmean(beside)
    return (
        f"beside a preparation, {len(paired)} pairs: {middle:.1%} less speed (half of them {low:.0%} to "
        f"{high:.0%}); all steps {1000 * mean:.3f} and {1000 * other:.3f} ms, {1 - mean / other:.1%} less; "
        f"longest {1000 * max(alone):.1f} and {1000 * max(beside):.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(MODELS_DIRECTORY / SHIPPED_MODEL))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=4, help="requests at once")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each part of a round")
    parser.add_argument("--pairs", type=int, default=60, help="slices with and without a preparation")
    parser.add_argument("--slice", type=float, default=0.1, help="seconds of each")
    parser.add_argument("--output", type=Path, help="JSON file for the numbers")
    options = parser.parse_args()
    model = Path(find_model(options.model, None))
    decoding = Decoding(model, options.rows, options.threads, options.dtype)
    decoding.steps(1.0)
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    prepared: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(options.rounds):
        found["alone"].append(statistics.median(decoding.steps(options.seconds)))
        for arm in ARMS[1:]:
            with preparing(decoding, model, bounded=arm == "bounded") as taken:
                found[arm].append(statistics.median(decoding.steps(options.seconds)))
            prepared[arm] += taken
    paired = pairs(decoding, model, options.pairs, options.slice)
    with preparing(decoding, model, bounded=True) as whole:
        ends = time.perf_counter() + LONGEST_WAIT
        while not whole and time.perf_counter() < ends:
            decoding.steps(0.1)
    switches = []
    for _ in range(10):
        decoding.executor.new_weights.prepare(str(model))
        began = time.perf_counter()
        decoding.executor.new_weights.switch()
        switches.append(time.perf_counter() - began)
        decoding.steps(0.3)
    for arm in ARMS if options.rounds > 1 else ():
        ratios = [each / alone - 1 for each, alone in zip(found[arm], found["alone"], strict=True)]
        text = f"{arm:>9}: {1000 * statistics.median(found[arm]):6.2f} ms a step of {options.rows} rows"
        if arm != "alone":
            low, _, high = statistics.quantiles(ratios, n=4)
            text += f", {statistics.median(ratios):+.1%} (half of the rounds {low:+.0%} to {high:+.0%})"
        if prepared[arm]:
            text += f"; prepared in {statistics.mean(prepared[arm]):.2f} s"
        print(text)
    if paired:
        print(text_of(paired))
    took = f"{whole[0]:.1f} s" if whole else f"over {LONGEST_WAIT:.0f} s"
    print(f"one preparation beside steps, bounded: {took}")
    print(f"the switch: {1000 * statistics.median(switches):.2f} ms, at most {1000 * max(switches):.2f}")
    if options.output:
        numbers = {"steps": found, "prepared": prepared, "switches": switches}
        options.output.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
