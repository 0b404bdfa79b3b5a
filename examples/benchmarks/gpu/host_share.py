#!/usr/bin/env python3
"""Benchmark of the host's share of decode steps, on a pretended device.

    python -m examples.benchmarks.gpu.host_share
    python -m examples.benchmarks.gpu.host_share --rows 1 256 --device-ms 1.4

Scheduler, packing of rows and results are real. The model computes nothing: its device is pretended, and
is done so many milliseconds after a launch. Printed is how long it idles between two steps. The host's time
is its CPU time, so that a busy machine shows the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

BLOCK = 16
PROMPT = 128
VOCABULARY = 64
"""Tokens to choose from: few, as a device would choose."""
ROUTER = b"router"


class PretendedDevice:
    """A device that computes one launched step after the other, each for the same time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._waited = 0.0
        self.free_at = 0.0
        self.steps: list[tuple[float, float, float]] = []
        """Launches: time, seconds that the device had idled, CPU seconds of the host."""

    def begin_fetch(self, tensor: Any) -> Callable[[], Any]:
        """In place of :func:`engine.attention.transfer.begin_fetch`, the end of each launch."""
        now = self._now()
        self.steps.append((now, max(0.0, now - self.free_at), time.thread_time()))
        self.free_at = done = max(now, self.free_at) + self.seconds

        def numbers() -> Any:
            self._waited += max(0.0, done - self._now())
            return tensor.numpy()

        return numbers

    def _now(self) -> float:
        """CPU seconds of the host, and those that it waited: other processes do not count."""
        return time.thread_time() + self._waited


class NullGraphs:
    """In place of captured steps: packs their rows and gives logits that cost nothing."""

    def __init__(self, most: int, width: int) -> None:
        import torch

        from engine.attention.packed_rows import HEADER

        self._logits = torch.randn(most, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self._lines = torch.zeros(most, HEADER + width, dtype=torch.int32)

    def forward(self, packed: Any, ids: Any, _wanted: Any, followed: Any = None) -> Any:
        import torch

        from engine.attention.packed_rows import pack_lines

        if packed.num_single == len(packed.starts):
            sources = None if followed is None else followed.sources
            lines = pack_lines(packed, len(ids), 0, ids, sources)
            self._lines[: len(ids), : lines.shape[1]].copy_(torch.from_numpy(lines))
        return self._logits[: len(ids)]


class PretendedExecutor:
    """The part of an executor that an instance alone on one device uses."""

    needs_tokens = has_workers = False
    computes_apart = True
    image_encoder = None

    def __init__(self, rows: int, tokens: int, *, ahead: bool) -> None:
        import torch

        from engine.compute.runner import ModelRunner
        from engine.model.weights import LoadedModel

        self.runs_ahead, self.in_flight = ahead, 1 + ahead
        model = LoadedModel(None, (), VOCABULARY, torch.float32, torch.device("cpu"))
        graphs: Any = NullGraphs(max(rows * PROMPT, 2048), -(-tokens // BLOCK))
        cache: Any = object()
        self._runner = ModelRunner(model, cache, BLOCK, graphs=graphs)
        self._pending: list[Any] = []

    def begin(self, step: Any, _sizes: Any = ()) -> None:
        self._pending.append(self._runner.begin(step))

    def finish(self) -> Any:
        return self._pending.pop(0)()

    def expert_times(self) -> None:
        return None

    def tokens_per_expert(self) -> dict[int, int]:
        return {}


def measure(rows: int, answer: int, device_ms: float, *, ahead: bool) -> dict[str, float | bool]:
    """Decode steps of so many rows."""
    import torch

    from engine.compute import runner
    from engine.config import CacheConfig, EngineConfig, SchedulerConfig
    from engine.core import EngineCore
    from engine.messages import Submit
    from engine.model.checkpoint import ModelInfo
    from engine.sampling import SamplingParams

    torch.set_num_threads(1)
    device = PretendedDevice(device_ms / 1000)
    runner.begin_fetch = device.begin_fetch  # type: ignore[attr-defined]  # imported there
    tokens = PROMPT + answer + 1
    info = ModelInfo("", "null", "", VOCABULARY, tokens, "float32", (), 0)
    config = EngineConfig(
        cache=CacheConfig(block_size=BLOCK),
        scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(2048, rows * PROMPT)),
    )
    executor: Any = PretendedExecutor(rows, tokens, ahead=ahead)
    blocks = rows * (-(-tokens // BLOCK) + 1)
    core = EngineCore(config, info, executor, num_blocks=blocks, max_model_len=tokens)
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    for number in range(rows):
        prompt = [(number * 31 + place * 7) % VOCABULARY for place in range(PROMPT)]
        refused = core.submit(ROUTER, Submit(number, str(number), prompt, params, seed=number))
        assert refused is None, refused
    while core.has_work:
        core.step()
    quarter = len(device.steps) // 4  # of the steps in which all decode, neither the first nor the last
    steps = device.steps[quarter:-quarter]
    number = len(steps) - 1
    idle = sorted(each[1] for each in steps)
    return {
        "rows": rows,
        "ahead": ahead,
        "steps": number,
        "step_ms": 1000 * (steps[-1][0] - steps[0][0]) / number,
        "host_ms": 1000 * (steps[-1][2] - steps[0][2]) / number,
        "idle_ms": 1000 * sum(idle) / len(idle),
        "median_idle_ms": 1000 * idle[len(idle) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1, 32, 256], help="in each step (default: %(default)s)")
    add("--output-len", type=int, default=300, help="tokens per answer (default: %(default)s)")
    add("--device-ms", type=float, default=1.4, help="milliseconds of a step (default: %(default)s)")
    add("--output-json", type=Path, metavar="FILE", help="write the numbers into this file")
    args = parser.parse_args()
    results = [
        measure(rows, args.output_len, args.device_ms, ahead=ahead)
        for rows in args.rows
        for ahead in (False, True)
    ]
    print(f"A device whose steps take {args.device_ms} ms; milliseconds:")
    print("| rows | scheduled | a step | host's CPU | device idles | median |")
    print("| ---: | :-------- | -----: | ---------: | -----------: | -----: |")
    for one in results:
        how = "ahead" if one["ahead"] else "after"
        numbers = f"{one['step_ms']:>6.3f} | {one['host_ms']:>10.3f} | {one['idle_ms']:>12.3f}"
        print(f"| {one['rows']:>4} | {how:<9} | {numbers} | {one['median_idle_ms']:>6.3f} |")
    if args.output_json is not None:
        args.output_json.write_text(
            json.dumps({"load": os.getloadavg(), "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
