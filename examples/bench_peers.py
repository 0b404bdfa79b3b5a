#!/usr/bin/env python3
"""Lockstep against other serving systems: the same model, prompts and load generator, in turn in one run.

    examples/install_peers.sh                                  # once; what is missing is left out, and said
    python examples/bench_peers.py                             # dense-small in bfloat16: 10 minutes
    python examples/bench_peers.py --models moe-small --systems lockstep lockstep-ep vllm transformers
    python examples/bench_peers.py --workloads prefix --concurrency 32

All servers of a model are started first and stay; those that are not measured sleep. Then each is loaded in
turn, again and again, so that whatever else the machine does hits all of them. Printed are medians over the
repeats with the lowest and the highest, and how many times the best of Lockstep's settings is ahead of
each other system, again per repeat. The models are made at the first run (``make_bench_models.py``).

    lockstep          serve MODEL -dp 2: an instance for each core, experts whole on each
    lockstep-dp1      serve MODEL -dp 1: one instance with all cores
    lockstep-ep       serve MODEL -dp 2 -ep: experts spread, in lockstep
    vllm              vllm serve MODEL: compiled, a core left free, as is its default
    vllm-cores        the same on all cores
    vllm-eager        vllm serve MODEL --enforce-eager
    transformers      transformers serve MODEL --continuous-batching, all cores

transformers takes texts, so it gets the prompts as text. Before and after, memory bandwidth and the rate of
matrix products are measured: compare runs only where these agree, and numbers of one run rather than of two.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))  # where Python was told not to look

import bench_serving
from bench_lockstep import print_table, rounded, spread

Args = argparse.Namespace

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "build" / "models"
PEERS = Path(os.environ.get("PEERS", ROOT / "build" / "peers"))
START_SECONDS = 600.0
WORKLOADS = {"plain": (0, 128, 64), "prefix": (512, 32, 64)}
"""Tokens that all prompts of a run share, tokens of each prompt, tokens of each answer."""
REQUESTS = {1: 4, 8: 24, 32: 64}
"""By concurrency."""


@dataclass(frozen=True)
class System:
    """How a server is started; ``{model}``, ``{dtype}``, ``{port}`` and ``{python}`` are filled in."""

    command: str
    environment: dict[str, str] = field(default_factory=dict)
    peer: str = ""
    """The environment under build/peers that it needs."""
    texts: bool = False
    """It takes no token ids, and does not report usage."""
    name: str = "bench"
    """Of the model in requests; empty: its directory."""

    @property
    def is_ours(self) -> bool:
        return not self.peer

    @property
    def is_installed(self) -> bool:
        return self.is_ours or (PEERS / self.peer / "bin" / shlex.split(self.command)[0]).exists()


CORES = os.cpu_count() or 1
OURS = "{python} -P -m router.serve {model} --served-model-name bench --dtype {dtype} --port {port}"
OURS += " --max-model-len 2048 --disable-access-log --kv-cache-memory-bytes 1G"
VLLM = "vllm serve {model} --served-model-name bench --dtype {dtype} --host 127.0.0.1 --port {port}"
VLLM += " --max-model-len 2048"
HF = "transformers serve {model} --host 127.0.0.1 --port {port} --device cpu --dtype {dtype}"
HF += " --continuous-batching --cb-num-blocks 64"
KV = {"VLLM_CPU_KVCACHE_SPACE": "1"}
SYSTEMS = {
    "lockstep": System(OURS + " -dp 2 --no-enable-expert-parallel"),
    "lockstep-dp1": System(OURS + " -dp 1"),
    "lockstep-ep": System(OURS + " -dp 2 -ep"),
    "vllm": System(VLLM, KV, peer="vllm"),
    "vllm-cores": System(VLLM, KV | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}"}, peer="vllm"),
    "vllm-eager": System(VLLM + " --enforce-eager", KV, peer="vllm"),
    "transformers": System(HF, {"OMP_NUM_THREADS": str(CORES)}, peer="vllm", texts=True, name=""),
}
DEFAULT = {
    "dense-small": ["lockstep", "lockstep-dp1", "vllm", "vllm-cores", "transformers"],
    "dense-0.5b": ["lockstep", "lockstep-dp1", "vllm", "vllm-cores"],
    "moe-small": ["lockstep", "lockstep-dp1", "lockstep-ep", "vllm", "vllm-cores", "transformers"],
}


@dataclass
class Cell:
    """All repeats of one system under one load."""

    system: str
    workload: str
    concurrency: int
    runs: list[dict[str, Any]] = field(default_factory=list)

    def of(self, key: str) -> list[float]:
        return [run[key] for run in self.runs if key in run]


# ---- servers


@contextlib.contextmanager
def started(name: str, model: Path, dtype: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """A server as a child, its address and its log; ended with the block."""
    system = SYSTEMS[name]
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, rpc_port = one.getsockname()[1], other.getsockname()[1]
    command = system.command.format(model=model, dtype=dtype, port=port, python=sys.executable)
    if system.is_ours:
        command += f" --data-parallel-rpc-port {rpc_port}"
    words = shlex.split(command)
    if system.peer:
        words[0] = str(PEERS / system.peer / "bin" / words[0])
    environment = {**os.environ, "LOCKSTEP_PARENT_PID": str(os.getpid()), "HF_HUB_OFFLINE": "1"}
    environment |= system.environment
    if system.peer:  # each chooses its own
        for variable in {"OMP_NUM_THREADS", "PYTHONPATH"} - system.environment.keys():
            environment.pop(variable, None)
    with tempfile.NamedTemporaryFile("w+", prefix=f"bench-{name}-", suffix=".log") as log:
        tell(f"starting {name} (log: {log.name})")
        child = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
        try:
            yield child, f"http://127.0.0.1:{port}", Path(log.name)
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()


def until_ready(name: str, child: subprocess.Popen[bytes], url: str, log: Path) -> float:
    """Seconds until it is healthy."""
    began = time.monotonic()
    while time.monotonic() - began < START_SECONDS:
        if child.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=2) as response:
            if response.status == 200:
                return time.monotonic() - began
        time.sleep(0.3)
    raise SystemExit(
        f"{name} did not become ready; its log ends with\n{log.read_text(errors='replace')[-2000:]}"
    )


# ---- load


class Load:
    """Sends the same prompts to every system."""

    def __init__(self, model: Path, args: Args) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._model, self._args = model, args

    async def run(self, name: str, url: str, workload: str, concurrency: int, number: int) -> dict[str, Any]:
        """One run; ``number`` makes its prompts differ from all others', below 0: a short one."""
        shared, own, answer = WORKLOADS[workload]
        system = SYSTEMS[name]
        rng = random.Random(f"{self._args.seed} {workload} {concurrency} {number}")

        def ids(count: int) -> list[int]:
            return [rng.randrange(300, self._tokenizer.get_vocab_size()) for _ in range(count)]

        prefix = ids(shared)
        requests = REQUESTS.get(concurrency, 2 * concurrency) if number >= 0 else concurrency
        prompts: list[Any] = [prefix + ids(own) for _ in range(requests)]
        if system.texts:
            prompts = [self._tokenizer.decode(prompt) for prompt in prompts]
        request = Args(
            backend="openai",
            base_url=url,
            endpoint="/v1/completions",
            model=system.name or str(self._model),
            temperature=0.0,
            random_output_len=answer,
            ignore_eos=not system.texts,
            request_rate=float("inf"),
            burstiness=1.0,
            metric_percentiles=[50.0, 99.0],
        )
        limit = asyncio.Semaphore(concurrency)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=300)
        ) as session:

            async def one(prompt: Any) -> bench_serving.Outcome:
                async with limit:
                    outcome = await bench_serving.send(session, request, prompt)
                if system.texts and outcome.error.endswith("without [DONE]"):  # its streams just end
                    outcome.error = ""
                return outcome

            began = time.perf_counter()
            outcomes = await asyncio.gather(*map(one, prompts))
            result = bench_serving.summary(request, concurrency, outcomes, time.perf_counter() - began)
        if result["failed"]:
            tell(f"{name}: {result['failed']} failed: {next(filter(None, result['errors']))}")
        keys = {
            "tokens_per_second": "output_throughput",
            "ttft_ms": "p50_ttft_ms",
            "ttft_p99_ms": "p99_ttft_ms",
        }
        keys |= {"itl_ms": "p50_itl_ms", "failed": "failed"}
        return {ours: result[theirs] for ours, theirs in keys.items()}


def bench_model(name: str, args: Args) -> dict[str, Any]:
    """All systems on one model."""
    model = Path(name) if Path(name).is_dir() else MODELS / name
    if not (model / "config.json").exists():
        maker = Path(__file__).with_name("make_bench_models.py")
        subprocess.run([sys.executable, str(maker), str(MODELS), name], check=True, stdout=sys.stderr)
    wanted = args.systems or DEFAULT.get(name, ["lockstep", "vllm"])
    systems = [one for one in wanted if SYSTEMS[one].is_installed]
    for missing in sorted(set(wanted) - set(systems)):
        tell(f"{missing} is not installed and left out (examples/install_peers.sh)")
    cells = [
        Cell(system, workload, concurrency)
        for workload in args.workloads
        for concurrency in args.concurrency
        for system in systems
    ]
    load, page = Load(model, args), {"model": name, "dtype": args.dtype, "calibration": [calibrate()]}
    with contextlib.ExitStack() as stack:
        urls, page["start_seconds"] = {}, {}
        for system in systems:
            child, urls[system], log = stack.enter_context(started(system, model, args.dtype))
            page["start_seconds"][system] = round(until_ready(system, child, urls[system], log), 1)
            asyncio.run(
                load.run(system, urls[system], "plain", 8, -1)
            )  # what is made at first use is made now
        for number in range(args.repeats):
            for cell in cells:
                run = asyncio.run(
                    load.run(cell.system, urls[cell.system], cell.workload, cell.concurrency, number)
                )
                cell.runs.append(run | {"load_average": os.getloadavg()[0]})
                speed, first = run["tokens_per_second"], run["ttft_ms"]
                what = f"{name} {number + 1}: {cell.workload} {cell.concurrency}: {cell.system}"
                tell(f"{what}: {speed:.0f} tok/s, TTFT {first:.0f} ms")
    page["calibration"].append(calibrate())
    print_model(name, args, cells, systems, page)
    page["cells"] = [
        {"system": c.system, "workload": c.workload, "concurrency": c.concurrency, "runs": rounded(c.runs)}
        for c in cells
    ]
    return page


# ---- what the machine can do


def calibrate() -> dict[str, float]:
    """GB/s of reading a GiB with all threads, and GFLOP/s of a product of bfloat16."""
    import torch

    torch.set_num_threads(CORES)
    block = torch.ones(1 << 28, dtype=torch.float32)
    one = torch.ones(1024, 1024, dtype=torch.bfloat16)

    def best(action: Any, times: int) -> float:
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    return {
        "read_gb_per_s": round(block.nbytes / best(block.sum, 4) / 1e9, 1),
        "bf16_gflop_per_s": round(2 * 1024**3 / best(lambda: one @ one, 20) / 1e9, 0),
    }


# ---- tables


def print_model(
    name: str, args: Args, cells: Sequence[Cell], systems: Sequence[str], page: dict[str, Any]
) -> None:
    before, after = page["calibration"]
    print(f"\n{name}, {args.dtype}. Calibration before {before}, after {after}.")
    print(f"Seconds to start: {page['start_seconds']}")
    for workload in args.workloads:
        shared, own, answer = WORKLOADS[workload]
        of = {(c.system, c.concurrency): c for c in cells if c.workload == workload}
        prompt = f"{shared} shared + {own}" if shared else f"{own}"
        print(
            f"\nPrompts of {prompt} tokens, answers of {answer}; median (lowest-highest) of {args.repeats}\n"
        )
        rows = [
            [system]
            + [
                text
                for c in args.concurrency
                for text in (
                    spread(of[system, c].of("tokens_per_second")),
                    spread(of[system, c].of("ttft_ms")),
                )
            ]
            for system in systems
        ]
        titles = [text for c in args.concurrency for text in (f"tok/s, {c} at once", f"TTFT p50 ms, {c}")]
        print_table(["system", *titles], rows)
        ours = [system for system in systems if SYSTEMS[system].is_ours]
        others = [system for system in systems if not SYSTEMS[system].is_ours]
        if ours and others:
            print("\nThe best of Lockstep's settings over each other system, and over the best of vLLM's:\n")
            groups = {system: [system] for system in others}
            vllm = [system for system in others if system.startswith("vllm")]
            groups |= {"best of vllm": vllm} if len(vllm) > 1 else {}
            rows = [
                [title] + [spread(ratios(of, ours, group, c, args.repeats), 2) for c in args.concurrency]
                for title, group in groups.items()
            ]
            print_table(["tok/s over", *(f"{c} at once" for c in args.concurrency)], rows)


def ratios(
    of: dict[tuple[str, int], Cell],
    ours: Sequence[str],
    others: Sequence[str],
    concurrency: int,
    repeats: int,
) -> list[float]:
    """Per repeat: the best of ours over the best of the others."""

    def best(systems: Sequence[str], number: int) -> float:
        return max(of[system, concurrency].runs[number]["tokens_per_second"] for system in systems)

    return [best(ours, number) / max(best(others, number), 1e-9) for number in range(repeats)]


def plot(directory: Path, page: dict[str, Any]) -> None:
    """Bars of throughput by concurrency, a picture per model and workload."""
    try:
        import matplotlib
    except ImportError:
        tell("no plots: pip install 'lockstep[bench]' brings matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    for model in page["models"]:
        for workload in sorted({cell["workload"] for cell in model["cells"]}):
            cells = [cell for cell in model["cells"] if cell["workload"] == workload]
            systems = list(dict.fromkeys(cell["system"] for cell in cells))
            counts = list(dict.fromkeys(cell["concurrency"] for cell in cells))
            figure, axes = pyplot.subplots(figsize=(8, 4))
            for place, system in enumerate(systems):
                runs = [
                    [run["tokens_per_second"] for run in cell["runs"]]
                    for cell in cells
                    if cell["system"] == system
                ]
                middle = [statistics.median(values) for values in runs]
                spans = [[m - min(v) for m, v in zip(middle, runs, strict=True)],
                         [max(v) - m for m, v in zip(middle, runs, strict=True)]]  # fmt: skip
                at = [number + 0.8 * place / len(systems) for number in range(len(counts))]
                axes.bar(at, middle, 0.8 / len(systems), label=system, yerr=spans, capsize=2)
            axes.set_xticks(
                [number + 0.35 for number in range(len(counts))], [f"{count} at once" for count in counts]
            )
            axes.set_ylabel("output tokens/s")
            axes.set_title(f"{model['model']}, {model['dtype']}, {workload}")
            axes.legend(fontsize=8)
            figure.savefig(
                directory / f"{model['model']}-{model['dtype']}-{workload}.svg", bbox_inches="tight"
            )
            pyplot.close(figure)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--models", nargs="+", default=["dense-small"], help="names or directories (default: %(default)s)")
    add("--systems", nargs="+", choices=[*SYSTEMS], help="(default: those that fit the model)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default: %(default)s)")
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="(default: %(default)s)")
    add("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS], help="(default: all)")
    add("--repeats", type=int, default=3, help="of every cell, interleaved (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--output-json", type=Path, metavar="FILE", help="write all numbers into this file")
    add("--plots", type=Path, metavar="DIRECTORY", help="draw them, too")
    args = parser.parse_args()
    if min(*args.concurrency, args.repeats) < 1:
        parser.error("a count is too small")
    return args


def main() -> int:
    args = parse_args()
    page: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": bench_serving.machine(),
        "systems": {name: system.command for name, system in SYSTEMS.items()},
        "models": [],
    }
    for name in args.models:
        page["models"].append(bench_model(name, args))
        if args.output_json is not None:
            args.output_json.parent.mkdir(parents=True, exist_ok=True)
            args.output_json.write_text(json.dumps(page, indent=1) + "\n")
    if args.plots is not None:
        plot(args.plots, page)
    failed = sum(run["failed"] for model in page["models"] for cell in model["cells"] for run in cell["runs"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
