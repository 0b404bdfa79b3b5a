"""Steps of one model with random weights: which paths are on, and times.

    python -m examples.benchmarks.gpu.model_steps --shape qwen3-0.6b --rows 1 32 256 --output FILE

The engine's own executor computes, without a mesh around it. Each part is written as soon as it is known, so
that what was measured stays when something later fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.executor.uni import UniExecutor
from engine.model.checkpoint import read_model_info
from engine.sampling import SamplingParams
from engine.step import Admit, Step
from examples.benchmarks.gpu.shapes import SHAPES, read_bytes, write_config
from examples.benchmarks.gpu.whole_files import write_whole

BLOCK = 16
CHUNK = 2048
"""Tokens of a prompt that a step computes, at most."""
WARM_STEPS = 3
PROMPTS = 3
"""Prompts of each length, behind a first one."""
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-k and top-p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top-p": {"temperature": 0.6, "top_p": 0.95},
}


class Report:
    """Facts in a JSON file, written again at each one."""

    def __init__(self, path: Path | None) -> None:
        self.facts: dict[str, Any] = {"rows": []}
        self._path = path

    def add(self, **facts: Any) -> None:
        self.facts.update(facts)
        self.write()

    def add_row(self, **facts: Any) -> None:
        self.facts["rows"].append(facts)
        self.write()

    def write(self) -> None:
        if self._path is not None:
            write_whole(self._path, json.dumps(self.facts, indent=2))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def bandwidth(device: str) -> float:
    """Bytes per second that a copy reads and writes."""
    size = (1 << 30) if device == "cuda" else (32 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * size / min(times)


def memory_of(device: str) -> dict[str, Any]:
    """Bytes in use on the device by torch, by the driver, and by nvidia-smi."""
    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    found: dict[str, Any] = {
        "tensors": torch.cuda.memory_allocated(),
        "pools": torch.cuda.memory_reserved(),
        "driver": total - free,
    }
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        found["nvidia_smi"] = [int(each) << 20 for each in done.stdout.split() if each.isdigit()]
    return found


class Model:
    """A loaded model with a cache, and requests in it."""

    def __init__(
        self, shape: str, most_rows: int, context: int, device: DeviceConfig, tiny: bool, report: Report
    ) -> None:
        self.context, self.device = context, device.device
        self._report = report
        self.per_request = (context + 200) // BLOCK + 1
        directory = Path(tempfile.mkdtemp())
        room = torch.cuda.get_device_properties(0).total_memory if self.device == "cuda" else None
        longest = max(CHUNK, self.per_request * BLOCK)
        self.config = write_config(shape, tiny, directory, room, longest)
        settings = EngineConfig(
            model=ModelConfig(model=str(directory), load_format="dummy", max_model_len=longest),
            device=device,
            scheduler=SchedulerConfig(max_num_seqs=most_rows, max_num_batched_tokens=CHUNK),
            cache=CacheConfig(),
        )
        self.executor = UniExecutor(settings, read_model_info(directory, weights=False), 1)
        memory = {"before": memory_of(self.device)}
        began = time.perf_counter()
        self.facts = self.executor.load(lambda phase: None)
        loaded = time.perf_counter()
        memory["weights"] = memory_of(self.device)
        free = self.executor.free_kv_memory()
        memory["largest step"] = memory_of(self.device)
        rehearsed = time.perf_counter()
        wanted = self.per_request * most_rows + 64
        self.num_blocks = int(min(wanted, free // (self.facts.kv.bytes_per_token * BLOCK)))
        self.executor.allocate(self.num_blocks)
        memory["cache and graphs"] = memory_of(self.device)
        report.add(
            memory=memory,
            cache_bytes=self.num_blocks * self.facts.kv.bytes_per_token * BLOCK,
            shape=shape,
            tiny=tiny,
            layers=self.config["num_hidden_layers"],
            parameters=self.facts.num_parameters,
            weight_bytes=self.facts.weight_bytes,
            kv_bytes_per_token=self.facts.kv.bytes_per_token,
            load_s=loaded - began,
            largest_step_s=rehearsed - loaded,
            allocate_s=time.perf_counter() - rehearsed,
            kv_room_bytes=free,
            attention=self.executor._backend,
            graphs=repr(getattr(self.executor._runner, "_graphs", None)),
        )

    def admit(self, rows: int, params: dict[str, Any], length: int | None = None) -> list[float]:
        """Compute the prompts of so many requests, one after the other; seconds of each."""
        length = self.context if length is None else length
        times = []
        for slot in range(rows):
            prompt = [(slot * 31 + place * 7) % 900 + 3 for place in range(length)]
            chosen = SamplingParams(max_tokens=200, ignore_eos=True, **params)
            blocks = list(range(slot * self.per_request, (slot + 1) * self.per_request))
            admits, tables = [Admit(slot, prompt, length, chosen, slot, ())], {0: blocks}
            began = time.perf_counter()
            for start in range(0, length, CHUNK):
                end = min(start + CHUNK, length)
                partial = [0] if end < length else []
                self.run(Step(admits, [slot], [start], [end - start], tables, partial))
                admits, tables = [], {}
            times.append(time.perf_counter() - began)
        return times

    def run(self, step: Step) -> None:
        self.executor.begin(step)
        self.executor.finish()

    def decode(self, rows: int, steps: int) -> list[float]:
        """Seconds of each of so many steps, in which each request gets a token."""
        times = []
        for step in range(WARM_STEPS + steps):
            began = time.perf_counter()
            self.run(Step([], [*range(rows)], [self.context + step] * rows, [1] * rows))
            times.append(time.perf_counter() - began)
        return times[WARM_STEPS:]


def kernels_of(call: Callable[[], None], path: Path | None) -> dict[str, Any]:
    """Kernels that a call launches on the device, and the longest ones, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    events = [each for each in profiled.key_averages() if each.device_type == torch.autograd.DeviceType.CUDA]
    if path is not None:
        path.write_text(profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=40))
    events.sort(key=lambda each: -each.self_device_time_total)
    return {
        "kernels": sum(each.count for each in events),
        "kernel_ms": sum(each.self_device_time_total for each in events) / 1000,
        "longest": [[each.key[:80], each.count, each.self_device_time_total / 1000] for each in events[:8]],
    }


def measure_prompts(model: Model, lengths: list[int], report: Report, deadline: float) -> None:
    """Milliseconds of one prompt of each length, and of a step behind it."""
    report.facts["prompts"] = []
    for length in lengths:
        if time.monotonic() > deadline:
            report.facts["prompts"].append({"tokens": length, "skipped": "no time is left"})
            report.write()
            continue
        first, *times = [model.admit(1, SAMPLING["greedy"], length)[0] for _ in range(1 + PROMPTS)]
        model.context = length
        step = statistics.median(model.decode(1, WARM_STEPS))
        found = {"first_ms": 1000 * first, "ms": 1000 * statistics.median(times), "step_ms": 1000 * step}
        report.facts["prompts"].append({"tokens": length} | found)
        report.write()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of one model."""
    report = Report(options.output)
    deadline = time.monotonic() + options.seconds
    if options.device == "cuda":
        report.add(device=torch.cuda.get_device_name(), capability=list(torch.cuda.get_device_capability()))
    copy = bandwidth(options.device)
    report.add(copy_bytes_per_s=copy)
    device = DeviceConfig(
        device=options.device, batch_invariant=options.batch_invariant, enforce_eager=options.enforce_eager
    )
    context = max(options.context, *options.prompts, 1)
    model = Model(options.shape, max(options.rows, default=1), context, device, options.tiny, report)
    measure_prompts(model, options.prompts, report, deadline)
    model.context = options.context
    for rows in options.rows:
        if rows * model.per_request > model.num_blocks:
            report.add_row(rows=rows, skipped="the cache is too small")
            continue
        least = read_bytes(
            model.config, model.facts.weight_bytes, rows, model.context, model.facts.kv.bytes_per_token
        )
        for kind, params in SAMPLING.items():
            if time.monotonic() > deadline:
                report.add_row(rows=rows, sampling=kind, skipped="no time is left")
                continue
            prompts = model.admit(rows, params)
            step = statistics.median(model.decode(rows, options.steps))
            report.add_row(
                rows=rows,
                sampling=kind,
                prompt_ms=1000 * statistics.median(prompts),
                step_ms=1000 * step,
                tokens_per_s=rows / step,
                limit_tokens_per_s=rows / (least / copy),
            )
        if options.device == "cuda":
            path = options.profile and options.profile / f"{options.shape}-{rows}.txt"
            found = kernels_of(lambda rows=rows: model.decode(rows, -WARM_STEPS + 1), path)
            report.add_row(rows=rows, profile=found)
    return report.facts


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="lengths of single prompts")
    parser.add_argument("--enforce-eager", action="store_true", help="as the flag of lockstep serve")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=90.0, help="after which nothing new is begun")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch-invariant", action="store_true", help="as the flag of lockstep serve")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--profile", type=Path, help="directory for the profiler's tables")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(json.dumps(measure(parse(argv))))


if __name__ == "__main__":
    main()
