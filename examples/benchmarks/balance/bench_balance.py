#!/usr/bin/env python3
"""What moving experts brings under a skewed load, and what it costs.

    python examples/benchmarks/balance/bench_balance.py --instances 2 4 --output-json build/balance.json

The model is that of ``make_skewed_model.py``, made at the first run. For each number of instances there are
two meshes, with ``--enable-eplb`` and without, which are loaded in turn:

    skewed   prompts of one class of tokens: most rows go to the experts of one instance
    even     prompts of all classes

Printed beside each other: balancedness (mean over maximum of the instances' rows), tokens per second (of
prompts and answers), their ratio within a repeat, and two predictions of it, from figures of the mesh whose
experts stay. The seconds that its busiest instance computed experts become those of the rows that the busiest
one has with the other mesh's balancedness, and all else stays. ``predicted``: a row takes as long as before.
``on these cores``: a row takes as long as under the even load, when all instances compute at once. Where they
share cores, memory or a busy machine, that is longer. ``beside others``: the same, and what router and client
compute, which are on the same machine: while one instance computed and the others waited, they had a core for
themselves; when all compute, they take their time from them. ``fastest``: the fastest run of each mesh, which
other work on the machine has disturbed least, and the prediction from the one whose experts stay.

The last line is for machines with fewer cores than instances, and busy ones: the CPU time of the busiest
instance, which is the length of all steps where each has a core of its own. Its prediction takes what a row
through an expert costs from the CPU times and rows of the instances whose experts stay.

``--moves 100`` then has experts move as often, under streams of one token, another one each time. It prints a
histogram of the length of steps, as gaps between tokens of a stream, over the median of the eight around;
half the time without moves. From the instances' logs comes how long the steps were in which experts changed
places, and the ones behind them, over their neighbours: the mean of the medians of the four on either side.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.balance.make_skewed_model import CLASSES
from examples.benchmarks.bench_router import free_port
from examples.benchmarks.soak import metrics
from router.tools.bench.report import machine
from router.tools.local_mesh import mesh

MODEL = Path(__file__).parents[3] / "build" / "models" / "moe-skewed"
VOCABULARY = range(64, 4096)
REPORT_SECONDS = 1.2
"""Seconds after the last token until all instances have reported their counts."""
BOUNDS = (0.75, 1.25, 1.5, 2.0, 3.0)
"""Lengths of a step over its neighbours', as the histogram has them."""
AROUND = 4
"""Neighbours before a step, and behind it."""
CHANGED = re.compile(
    r"Engine_(\d+) .*began in a step of ([\d.]+) ms, the next one took ([\d.]+) ms, usual are ([\d.]+) ms; "
    r"of (\d+) other steps (\d+) took"
)
"""An instance's log line on the steps around a change."""
SETTLE = 90.0
"""Seconds within which the experts of a skewed load are where they belong."""
SETTLED = 0.9
"""Balancedness of a load whose experts are where they belong."""

Session = aiohttp.ClientSession


@dataclass
class Mesh:
    """One mesh of the two."""

    url: str
    admin: str = ""
    """Address of its admin API, if its experts move."""
    runs: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """By load."""


def prompts(count: int, length: int, classes: Sequence[int], rng: random.Random) -> list[list[int]]:
    """Prompts of tokens of one class each, in turn of all ``classes``."""
    found = []
    for number in range(count):
        of_class = range(VOCABULARY.start + classes[number % len(classes)], VOCABULARY.stop, CLASSES)
        found.append(rng.choices(of_class, k=length))
    return found


# ---- throughput


async def ask(session: Session, url: str, prompt: list[int], tokens: int) -> None:
    body = {"model": str(MODEL), "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        assert (await answer.json())["usage"]["completion_tokens"] == tokens


async def ask_all(url: str, asked: Sequence[list[int]], tokens: int, concurrency: int) -> float:
    """Seconds until all are answered, so many at once."""
    left: Iterator[list[int]] = iter(asked)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def client() -> None:
            for prompt in left:
                await ask(session, url, prompt, tokens)

        began = time.monotonic()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        return time.monotonic() - began


async def counted(url: str) -> dict[int, dict[str, float]]:
    """By instance: rows through its experts, seconds in their products, steps."""
    async with aiohttp.ClientSession() as session:
        found = await metrics(session, url)
    totals: dict[int, dict[str, float]] = {}
    for name, part in (("expert_tokens", ""), ("step_seconds", "experts"), ("steps", "")):
        for labels, value in found.get(f"lockstep:{name}_total", {}).items():
            named = dict(labels)
            if part in ("", named.get("part")):
                of_rank = totals.setdefault(int(named["engine"]), {})
                of_rank[name] = of_rank.get(name, 0.0) + value
    return totals


def cpu_seconds() -> tuple[dict[int, float], float]:
    """Seconds computed by each instance, by process, and by all else: routers, coordinators, this client."""
    instances: dict[int, float] = {}
    others = sum(psutil.Process().cpu_times()[:2])
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            seconds = sum(process.cpu_times()[:2])
            if "Engine" in " ".join(process.cmdline()):
                instances[process.pid] = seconds
            else:
                others += seconds
    return instances, float(others)


async def changes(admin: str) -> dict[str, Any]:
    """What the coordinator says of the balance."""
    async with aiohttp.ClientSession() as session, session.get(f"{admin}/admin/world") as answer:
        found: dict[str, Any] = (await answer.json())["balance"]
    return found


async def measure(one: Mesh, asked: Sequence[list[int]], args: argparse.Namespace) -> dict[str, float]:
    """One load, and what the instances counted meanwhile."""
    before, (instances, others) = await counted(one.url), cpu_seconds()
    seconds = await ask_all(one.url, asked, args.output_len, args.concurrency)
    instances_now, others_now = cpu_seconds()
    await asyncio.sleep(REPORT_SECONDS)
    after = await counted(one.url)
    rows = [after[rank]["expert_tokens"] - before[rank]["expert_tokens"] for rank in sorted(after)]
    spent = [after[rank]["step_seconds"] - before[rank]["step_seconds"] for rank in sorted(after)]
    # Those of the other mesh, which sleeps, have computed least.
    computed = sorted(instances_now[pid] - instances[pid] for pid in instances)[-len(rows) :]
    return {
        "seconds": seconds,
        "tokens_per_second": len(asked) * (args.input_len + args.output_len) / seconds,
        "steps": max(after[rank]["steps"] - before[rank]["steps"] for rank in after),
        "balancedness": statistics.fmean(rows) / max(rows),
        "busiest_seconds": max(spent),
        "busiest_rows": max(rows),
        "rows": sum(rows),
        "others_cpu_seconds": others_now - others,
        "busiest_cpu_seconds": computed[-1],
        "least_cpu_seconds": statistics.fmean(computed[:-1]),
    }


def predicted(
    still: dict[str, float], balancedness: float, size: int, per_row: float, more: float = 0.0
) -> float:
    """Throughput with this balancedness over that of the mesh whose experts stay.

    ``per_row``: seconds of a row through an expert then. ``more``: seconds that are longer for other reasons.
    """
    busiest = per_row * still["rows"] / size / balancedness
    return still["seconds"] / (still["seconds"] - still["busiest_seconds"] + busiest + more)


def cpu_ratio(still: dict[str, float], moving: dict[str, float]) -> float:
    """CPU time of the busiest instance where experts stay, over that where they move."""
    return still["busiest_cpu_seconds"] / moving["busiest_cpu_seconds"]


def predicted_cpu_ratio(still: dict[str, float], balancedness: float, size: int) -> float:
    """The same, by what a row costs the busiest instance where experts stay.

    It is 1 where none is the busiest.
    """
    others_rows = (still["rows"] - still["busiest_rows"]) / (size - 1)
    if still["busiest_rows"] < 1.2 * others_rows:
        return 1.0
    more_rows = still["busiest_rows"] - others_rows
    per_row = (still["busiest_cpu_seconds"] - still["least_cpu_seconds"]) / more_rows
    fewer_rows = still["busiest_rows"] - still["rows"] / size / balancedness
    return still["busiest_cpu_seconds"] / (still["busiest_cpu_seconds"] - per_row * fewer_rows)


def from_instances(still: dict[str, float], size: int) -> float:
    """Seconds that router and client take from instances, once all of these compute."""
    cores = len(os.sched_getaffinity(0))
    return still["others_cpu_seconds"] / cores if size >= cores else 0.0


def of_fastest(
    still: Sequence[dict[str, float]], moving: Sequence[dict[str, float]], size: int
) -> list[float]:
    """Throughput of the fastest runs of both meshes, as a ratio, and its prediction."""
    before, after = (min(runs, key=lambda run: run["seconds"]) for runs in (still, moving))
    ratio = after["tokens_per_second"] / before["tokens_per_second"]
    return [ratio, predicted(before, after["balancedness"], size, per_row([before]))]


def per_row(runs: Sequence[dict[str, float]]) -> float:
    """Seconds of a row in the busiest instance."""
    return statistics.median(run["busiest_seconds"] / run["busiest_rows"] for run in runs)


async def settle(one: Mesh, classes: Sequence[int], args: argparse.Namespace, rng: random.Random) -> None:
    """Load a mesh until its experts have moved, and stay where they are."""
    first = before = (await changes(one.admin))["changes"]
    until = time.monotonic() + SETTLE
    while time.monotonic() < until:
        asked = prompts(args.num_prompts, args.input_len, classes, rng)
        await ask_all(one.url, asked, args.output_len, args.concurrency)
        found = await changes(one.admin)
        if first < found["changes"] == before and found["balancedness"] > SETTLED:
            return
        before = found["changes"]


async def compare(size: int, still: Mesh, moving: Mesh, args: argparse.Namespace) -> dict[str, Any]:
    """Both loads, on both meshes in turn."""
    rng = random.Random(args.seed)
    page: dict[str, Any] = {"instances": size}
    for load, classes in (("even", list(range(CLASSES))), ("skewed", [0])):
        # Experts get where the load before wants them; the even one comes first, from the start's places.
        if load == "skewed":
            await settle(moving, classes, args, rng)
        else:
            for one in (still, moving):
                warm = prompts(args.concurrency, args.input_len, classes, rng)
                await ask_all(one.url, warm, args.output_len, args.concurrency)
        before = await changes(moving.admin)
        for number in range(args.repeats):
            asked = prompts(args.num_prompts, args.input_len, classes, rng)
            for one in (still, moving) if number % 2 else (moving, still):
                one.runs.setdefault(load, []).append(await measure(one, asked, args))
        after = await changes(moving.admin)
        page[load] = {
            "still": still.runs[load],
            "moving": moving.runs[load],
            "moves": after["moves"] - (before["moves"] if load == "even" else 0),
            "ratios": [
                b["tokens_per_second"] / a["tokens_per_second"]
                for a, b in zip(still.runs[load], moving.runs[load], strict=True)
            ],
            "predicted": [
                predicted(a, b["balancedness"], size, per_row([a]))
                for a, b in zip(still.runs[load], moving.runs[load], strict=True)
            ],
            "cpu_ratios": [
                cpu_ratio(*pair) for pair in zip(still.runs[load], moving.runs[load], strict=True)
            ],
            "predicted_cpu_ratios": [
                predicted_cpu_ratio(a, b["balancedness"], size)
                for a, b in zip(still.runs[load], moving.runs[load], strict=True)
            ],
            "fastest": of_fastest(still.runs[load], moving.runs[load], size),
            "on_these_cores": [
                predicted(a, b["balancedness"], size, per_row(still.runs["even"]))
                for a, b in zip(still.runs[load], moving.runs[load], strict=True)
            ],
            "beside_others": [
                predicted(a, b["balancedness"], size, per_row(still.runs["even"]), from_instances(a, size))
                for a, b in zip(still.runs[load], moving.runs[load], strict=True)
            ],
        }
        tell(size, load, page[load])
    return page


def tell(size: int, load: str, found: dict[str, Any]) -> None:
    def middle(runs: Sequence[dict[str, float]], name: str) -> float:
        return statistics.median(run[name] for run in runs)

    still, moving, ratios = found["still"], found["moving"], found["ratios"]
    print(
        f"dp {size}, {load}: balancedness {middle(still, 'balancedness'):.2f} -> "
        f"{middle(moving, 'balancedness'):.2f}, tokens/s {middle(still, 'tokens_per_second'):.0f} -> "
        f"{middle(moving, 'tokens_per_second'):.0f}, ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}), predicted {statistics.median(found['predicted']):.2f}, "
        f"on these cores {statistics.median(found['on_these_cores']):.2f}, "
        f"beside others {statistics.median(found['beside_others']):.2f}, "
        f"fastest {found['fastest'][0]:.2f} (predicted {found['fastest'][1]:.2f}), {found['moves']} moves",
        flush=True,
    )
    for name, runs in (("stay", still), ("move", moving)):
        experts, seconds = middle(runs, "busiest_seconds"), middle(runs, "seconds")
        print(
            f"  experts {name}: {experts:.2f} s in the experts of the busiest instance, all else "
            f"{seconds - experts:.2f} s; router and client computed "
            f"{middle(runs, 'others_cpu_seconds'):.2f} s",
            flush=True,
        )
    of_cpu, foreseen = found["cpu_ratios"], statistics.median(found["predicted_cpu_ratios"])
    print(
        f"  CPU time of the busiest instance: {middle(still, 'busiest_cpu_seconds'):.2f} -> "
        f"{middle(moving, 'busiest_cpu_seconds'):.2f} s, ratio {statistics.median(of_cpu):.2f} "
        f"({min(of_cpu):.2f} to {max(of_cpu):.2f}), predicted {foreseen:.2f}",
        flush=True,
    )


# ---- the length of steps


async def stream(session: Session, url: str, prompt: list[int], tokens: int) -> list[float]:
    """Seconds between the tokens of one answer."""
    body = {"model": str(MODEL), "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body["allowed_token_ids"] = prompt[:1]  # all rows go through the experts of one token
    times = []
    async with session.post(f"{url}/v1/completions", json=body | {"stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
    return [after - before for before, after in itertools.pairwise(times)]


def relative(gaps: Sequence[float]) -> list[float]:
    """Each gap over the median of its neighbours.

    The first ones, which the prompts of others lengthen, are left out.
    """
    inner = gaps[AROUND:]
    return [
        inner[at] / statistics.median([*inner[at - AROUND : at], *inner[at + 1 : at + 1 + AROUND]])
        for at in range(AROUND, len(inner) - AROUND)
    ]


async def wish(admin: str, over: asyncio.Event) -> None:
    """Ask that experts move, again and again."""
    async with aiohttp.ClientSession() as session:
        while not over.is_set():
            async with session.post(f"{admin}/eplb/rebalance", json={}) as answer:
                answer.raise_for_status()
            await asyncio.sleep(0.1)


async def feel(one: Mesh, args: argparse.Namespace) -> dict[str, Any]:
    """Streams of one token after another, in turn while experts move and while they stay."""
    rng = random.Random(args.seed)
    found: dict[str, list[float]] = {"moving": [], "still": []}
    longest: dict[str, float] = {"moving": 0.0, "still": 0.0}
    began, first = time.monotonic(), (await changes(one.admin))["changes"]
    done = 0
    while done < args.moves and time.monotonic() - began < args.most_seconds:
        token = rng.choice(VOCABULARY)
        for name in ("moving", "still"):
            asked = [[token] * 8] * args.streams
            over = asyncio.Event()
            wishes = asyncio.create_task(wish(one.admin, over)) if name == "moving" else None
            async with aiohttp.ClientSession() as session:
                gaps = await asyncio.gather(*(stream(session, one.url, each, args.tokens) for each in asked))
            over.set()
            if wishes is not None:
                await wishes
            found[name] += [ratio for each in gaps for ratio in relative(each)]
            longest[name] = max(longest[name], *(max(each[AROUND:]) for each in gaps))
        done = (await changes(one.admin))["changes"] - first
    page: dict[str, Any] = {"rebalancings": done, "seconds": time.monotonic() - began}
    for name, ratios in found.items():
        steps = [sum(low < ratio <= high for ratio in ratios) for low, high in bins()]
        page[name] = {
            "steps": steps,
            "most": max(ratios),
            "p99.9": sorted(ratios)[int(0.999 * len(ratios))],
            "longest_ms": 1000 * longest[name],
        }
        shown = ", ".join(f"{count} up to {high}" for count, (_, high) in zip(steps, bins(), strict=True))
        print(f"{done} rebalancings, {name}: {shown}; at most {max(ratios):.1f} times its neighbours, "
              f"{1000 * longest[name]:.0f} ms", flush=True)  # fmt: skip
    return page


def around_changes(log: str) -> dict[str, Any]:
    """Steps around changes: with the change, and the next, over their neighbours."""
    lines = CHANGED.findall(log)
    found = [tuple(map(float, each[1:4])) for each in lines]
    last = {instance: (int(steps), int(long)) for instance, *_, steps, long in lines}
    others, long = (sum(each[at] for each in last.values()) for at in (0, 1))
    page: dict[str, Any] = {"other_steps": others, "of_which_over_twice": long}
    if others:
        print(
            f"{others} other steps: {long} over twice their neighbours ({100 * long / others:.2f} %)",
            flush=True,
        )
    for at, name in enumerate(("changes", "next")):
        ratios = sorted(each[at] / each[2] for each in found)
        if not ratios:
            continue
        page[name] = {
            "steps": [sum(low < ratio <= high for ratio in ratios) for low, high in bins()],
            "p50": statistics.median(ratios),
            "p90": ratios[int(0.9 * (len(ratios) - 1))],
            "most": ratios[-1],
            "longest_ms": max(each[at] for each in found),
            "usual_ms": statistics.median(each[2] for each in found),
        }
        counts = zip(page[name]["steps"], bins(), strict=True)
        shown = ", ".join(f"{count} up to {high}" for count, (_, high) in counts)
        print(f"{len(ratios)} steps ({name}): {shown}; median {page[name]['p50']:.2f}, at most "
              f"{ratios[-1]:.1f} times their neighbours, {page[name]['longest_ms']:.0f} ms "
              f"(usual {page[name]['usual_ms']:.1f})", flush=True)  # fmt: skip
    return page


def bins() -> list[tuple[float, float]]:
    return list(zip((0.0, *BOUNDS), (*BOUNDS, float("inf")), strict=True))


# ----


@contextlib.contextmanager
def started(
    size: int, config: dict[str, Any] | None, args: argparse.Namespace, log: Path | None = None
) -> Iterator[Mesh]:
    flags = f"{MODEL} -dp {size} -ep --no-enable-prefix-caching {args.serve_flags}"
    if config is None:
        with mesh(flags) as url:
            yield Mesh(url)
        return
    port = free_port()
    eplb = f"--admin-port {port} --enable-eplb --eplb-config {shlex.quote(json.dumps(config))}"
    with mesh(f"{flags} {eplb}", log_file=log) as url:
        yield Mesh(url, f"http://127.0.0.1:{port}")


def run(size: int, args: argparse.Namespace) -> dict[str, Any]:
    page: dict[str, Any] = {"instances": size}
    copies = {"num_redundant_experts": args.copies}
    if args.repeats:
        config = {"window_size": 20, "step_interval": 60, **copies}
        with started(size, None, args) as still, started(size, config, args) as moving:
            page |= asyncio.run(compare(size, still, moving, args))
    if args.moves:
        config = {"window_size": 10, "step_interval": 10**6, **copies}
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / "serve.log"
            with started(size, config, args, log) as one:
                page["lengths"] = asyncio.run(feel(one, args))
                page["lengths"] |= around_changes(log.read_text())
    return page


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--instances", type=int, nargs="+", default=[2, 4], help="(default: %(default)s)")
    add("--repeats", type=int, default=3, help="of each load and mesh, in turn (default: %(default)s)")
    add("--num-prompts", type=int, default=64, help="of each load (default: %(default)s)")
    add("--concurrency", type=int, default=16, help="requests at once (default: %(default)s)")
    add("--input-len", type=int, default=256, help="tokens per prompt (default: %(default)s)")
    add("--output-len", type=int, default=4, help="tokens per answer (default: %(default)s)")
    add("--copies", type=int, default=4, help="num_redundant_experts (default: %(default)s)")
    add("--moves", type=int, default=0, help="rebalancings for the length of steps (default: none)")
    add("--streams", type=int, default=16, help="streams meanwhile (default: %(default)s)")
    add("--tokens", type=int, default=100, help="of each of their answers (default: %(default)s)")
    add("--most-seconds", type=float, default=240.0, help="for these (default: %(default)s)")
    add(
        "--serve-flags",
        default="--dtype bfloat16 --kv-cache-memory-bytes 64M --max-num-seqs 32",
        help="for all meshes (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of the prompts")
    add("--output-json", type=Path, metavar="FILE", help="write all numbers into this file")
    args = parser.parse_args()
    if not (MODEL / "config.json").exists():
        maker = str(Path(__file__).with_name("make_skewed_model.py"))
        subprocess.run([sys.executable, maker, str(MODEL)], check=True, stdout=sys.stderr)
    pages = []
    for size in args.instances:
        pages.append(run(size, args))
        if args.output_json is not None:
            page = {"command": shlex.join(["python", *sys.argv]), "machine": machine(), "meshes": pages}
            args.output_json.parent.mkdir(parents=True, exist_ok=True)
            args.output_json.write_text(json.dumps(page, indent=1) + "\n")


if __name__ == "__main__":
    main()
