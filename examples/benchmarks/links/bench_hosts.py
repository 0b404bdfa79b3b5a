#!/usr/bin/env python3
"""Benchmark of meshes over two hosts, which are network namespaces with a link (needs root).

    sudo .venv/bin/python examples/benchmarks/links/bench_hosts.py --layouts ep tp pp --links 0 200:10
    sudo .venv/bin/python examples/benchmarks/links/bench_hosts.py --layouts ep --concurrency 1 8 32

A link is written DELAY[:RATE], in microseconds of one direction and in Gbit/s; without a rate there is no
bound. The model is moe-small of ``make_bench_models.py``, in bfloat16. For each layout:

    ep            one instance on each host, experts spread over both: ``-dp 2 -ep``
    tp            one instance, its layers cut over both hosts: ``--nnodes 2 -tp 2``
    pp            one instance, half of the layers on each host: ``--nnodes 2 -pp 2``
    independent   one instance on each host, nothing exchanged

a mesh per transport is started and stays; those that are not measured sleep. Then links, transports and loads
come in turn, again and again, so that other load on the machine hits all of them. Printed are tokens per
second and milliseconds between two tokens (ITL), the ratio of each transport to gloo within a repeat, and
bytes per token on the link. A second table explains the length of a step
(:mod:`examples.benchmarks.links.step_model`): measured on a link without delay, predicted for each other
link, and measured there.

Where the kernel has no netem, ``link_emulator.cpp`` carries the packets, on the cores of this machine: its
share of a core is printed, and how late it was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.bench_lockstep import measure, print_table, spread
from examples.benchmarks.links.host_meshes import LAYOUTS, measured, mesh_on_both
from examples.benchmarks.links.netns import Link, Network, exit_unless_possible, link_of, network
from examples.benchmarks.links.step_model import exchanges_of, predicted, slope
from router.tools.bench.report import machine

Args = argparse.Namespace

ROOT = Path(__file__).parents[3]
TRANSPORTS = {
    "tcp": "--mesh-transport tcp",
    "ucx": "--mesh-transport ucx",
    "gloo": "--mesh-transport gloo --all2all-backend allgather_reducescatter",
}
"""Arguments of ``serve`` by transport."""
SERVE_FLAGS = "--dtype bfloat16 --kv-cache-memory-bytes 128M"
WARM_UP = 8
"""Requests at once of the load that makes what is made at first use."""
EXPLAINED = 0.1
"""Largest difference of a step from its prediction, as a share of it."""


@dataclass
class Cell:
    """All repeats of one transport, link and load."""

    transport: str
    link: Link
    concurrency: int
    runs: list[dict[str, Any]] = field(default_factory=list)

    def of(self, key: str) -> list[float]:
        return [run[key] for run in self.runs if key in run]

    def median(self, key: str) -> float:
        return statistics.median(self.of(key) or [0.0])


def bench_layout(net: Network, name: str, args: Args, directory: Path) -> list[Cell]:
    """All cells of one layout."""
    layout = LAYOUTS[name]
    transports = ["none"] if name == "independent" else args.transports
    cells = [
        Cell(each, link, load) for link in args.links for load in args.concurrency for each in transports
    ]
    layers = json.loads((args.model / "config.json").read_text())["num_hidden_layers"]
    with contextlib.ExitStack() as stack:
        net.set(Link())
        urls = {}
        for index, transport in enumerate(transports):
            flags = f"{args.model} {args.serve_flags} {TRANSPORTS.get(transport, '')}".split()
            urls[transport] = stack.enter_context(mesh_on_both(net, directory, index, layout, flags))
        asked = {key: getattr(args, key) for key in ("seed", "input_len", "output_len")}
        asked["model"] = str(args.model)
        for transport in transports:
            measured(net, {**asked, "base_url": urls[transport], "concurrency": WARM_UP, "number": 0})
        for number in range(args.repeats):
            for cell in cells:
                net.set(cell.link)
                more = {"base_url": urls[cell.transport], "concurrency": cell.concurrency}
                # Nothing is in any prefix cache: each link has prompts of its own.
                prompts = 10000 * (number + 1) + 1000 * args.links.index(cell.link) + cell.concurrency
                run = measured(net, {**asked, **more, "number": prompts})
                num_bytes = run.get("link_bytes") or run["device_bytes"]
                run["bytes_per_token"] = num_bytes / run["tokens"]
                run["bytes_per_row"] = num_bytes / run["rows"]
                cell.runs.append(run)
                print(
                    f"{name} {number + 1}: {cell.transport}, {cell.link}, {cell.concurrency} at once: "
                    f"{run['tokens_per_second']:.0f} tok/s, ITL {run['tpot_ms']:.2f} ms, "
                    f"load {run['load_average']:.1f}",
                    file=sys.stderr,
                    flush=True,
                )
    print_layout(name, cells, net, layers, args.ways)
    return cells


def print_layout(
    name: str, cells: Sequence[Cell], net: Network, layers: int, ways: Mapping[Link, float]
) -> None:
    """The two tables of a layout."""
    print(f"\n{name}: `{' '.join(LAYOUTS[name].flags)}`, median (lowest-highest)\n")
    titles = ["link", "at once", "transport", "tokens/s", "ITL ms", "of gloo", "bytes/token"]
    rows = []
    for cell in cells:
        row = [str(cell.link), str(cell.concurrency), cell.transport]
        row += [spread(cell.of("tokens_per_second")), spread(cell.of("tpot_ms"), 2), ratio(cell, cells)]
        rows.append([*row, f"{cell.median('bytes_per_token'):.0f}"])
        if net.is_emulated:
            rows[-1] += [f"{cell.median('emulator_core'):.2f}", f"{cell.median('late_p50_us'):.0f}"]
    print_table([*titles, *(["link's core", "late us"] if net.is_emulated else [])], rows)
    explained = [row for transport in dict.fromkeys(cell.transport for cell in cells)
                 for row in explanation(name, transport, cells, layers, ways)]  # fmt: skip
    if explained:
        print(f"\n{name}: the length of a step, ms (ITL, the lowest of the repeats: other work only adds)\n")
        titles = [
            "transport",
            "at once",
            "link",
            "way us",
            "compute",
            "exchanges",
            "fitted",
            "predicted",
            "measured",
            "differs",
        ]
        print_table(titles, explained)


def ratio(cell: Cell, cells: Sequence[Cell]) -> str:
    """Tokens per second against gloo's in the same repeats, the median."""
    where = (cell.link, cell.concurrency)
    base = [one for one in cells if one.transport == "gloo" and (one.link, one.concurrency) == where]
    if not base or cell is base[0]:
        return ""
    pairs = zip(cell.of("tokens_per_second"), base[0].of("tokens_per_second"), strict=False)
    return f"{statistics.median(mine / theirs for mine, theirs in pairs):.2f}"


def explanation(
    name: str, transport: str, cells: Sequence[Cell], layers: int, ways: Mapping[Link, float]
) -> list[list[str]]:
    """Rows of the second table: the step over each link as predicted, and as measured."""
    rows = []
    for load in dict.fromkeys(cell.concurrency for cell in cells):
        mine = [cell for cell in cells if (cell.transport, cell.concurrency) == (transport, load)]
        base = next((cell for cell in mine if cell.link == Link()), None)
        if base is None or len({cell.link.delay_us for cell in mine}) < 2:
            continue
        compute = min(base.of("tpot_ms")) / 1000
        fitted = slope([(ways[cell.link], min(cell.of("tpot_ms")) / 1000) for cell in mine])
        for cell in mine:
            if cell is base:
                continue
            step_bytes = cell.median("bytes_per_row") * load / 2  # one of two directions
            exchanges = exchanges_of(name, layers, step_bytes, load)
            delay = ways[cell.link] - ways[Link()]
            guess = predicted(compute, exchanges, delay, cell.link.gbits)
            found = min(cell.of("tpot_ms")) / 1000
            differs = found / guess - 1
            row = [transport, str(load), str(cell.link), f"{1e6 * ways[cell.link]:.0f}"]
            row += [
                f"{1000 * compute:.2f}",
                f"{exchanges.count:.0f}",
                f"{fitted:.1f}",
                f"{1000 * guess:.2f}",
                f"{1000 * found:.2f}",
            ]
            rows.append([*row, f"{100 * differs:+.0f}%" + " !" * (abs(differs) > EXPLAINED)])
    return rows


def run_here(asked: dict[str, Any]) -> None:
    """One load on a mesh of this namespace, as JSON."""
    args = Args(seed=asked["seed"], input_len=asked["input_len"], output_len=asked["output_len"])
    load = asked["concurrency"]
    run = asyncio.run(measure(asked["base_url"], asked["model"], args, load, asked["number"]))
    requests = max(4, 2 * load)
    run["tokens"] = requests * args.output_len
    run["rows"] = requests * (args.input_len + args.output_len - 1)  # the last token is not computed on
    print(json.dumps(run))


def parse_args() -> Args:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--layouts", nargs="+", choices=[*LAYOUTS], default=["ep", "tp", "pp"], help="(default: %(default)s)")
    add("--transports", nargs="+", choices=[*TRANSPORTS], default=["tcp", "gloo"], help="(default: tcp gloo)")
    links = [Link(), Link(50, 10), Link(200, 10), Link(200, 1)]
    add("--links", nargs="+", type=link_of, default=links, help="(default: 0 50:10 200:10 200:1)")
    add("--concurrency", type=int, nargs="+", default=[1, 8], help="requests at once (default: %(default)s)")
    add("--repeats", type=int, default=3, help="of every cell, interleaved (default: %(default)s)")
    add("--model", type=Path, default=ROOT / "build" / "models" / "moe-small", help="(default: moe-small)")
    add("--input-len", type=int, default=64, help="tokens per prompt (default: %(default)s)")
    add("--output-len", type=int, default=48, help="tokens per answer (default: %(default)s)")
    add("--serve-flags", default=SERVE_FLAGS, help="for all meshes (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--logs", type=Path, help="directory for the logs, kept (default: a temporary one)")
    add("--output-json", type=Path, metavar="FILE", help="write all numbers into this file")
    add("--measure", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(*args.concurrency, args.repeats, args.input_len, args.output_len) < 1:
        parser.error("a count or a length is too small")
    return args


def main() -> int:
    args = parse_args()
    if args.measure is not None:
        run_here(args.measure)
        return 0
    exit_unless_possible()
    if not (args.model / "config.json").exists():
        maker = ROOT / "examples" / "benchmarks" / "make_bench_models.py"
        subprocess.run([sys.executable, str(maker), str(args.model.parent), args.model.name], check=True)
    found: dict[str, list[Cell]] = {}
    with tempfile.TemporaryDirectory() as temporary, network() as net:
        args.ways = {}
        for link in args.links:
            net.set(link)
            args.ways[link] = net.one_way()
        for name in args.layouts:
            directory = (args.logs or Path(temporary)) / name
            directory.mkdir(parents=True, exist_ok=True)
            found[name] = bench_layout(net, name, args, directory)
            if args.output_json is not None:
                args.output_json.parent.mkdir(parents=True, exist_ok=True)
                args.output_json.write_text(json.dumps(page_of(found, net, args), indent=1) + "\n")
    failed = sum(run["failed"] for cells in found.values() for cell in cells for run in cell.runs)
    if failed:
        print(f"{failed} requests failed", file=sys.stderr)
    return 1 if failed else 0


def page_of(found: dict[str, list[Cell]], net: Network, args: Args) -> dict[str, Any]:
    """What --output-json keeps."""
    return {
        "machine": machine(),
        "link": "emulated" if net.is_emulated else "netem",
        "one_way_us": {str(link): round(1e6 * way, 1) for link, way in args.ways.items()},
        "layouts": {
            name: [
                {
                    "transport": cell.transport,
                    "delay_us": cell.link.delay_us,
                    "gbits": cell.link.gbits,
                    "concurrency": cell.concurrency,
                    "runs": [{key: round(value, 4) for key, value in run.items()} for run in cell.runs],
                }
                for cell in cells
            ]
            for name, cells in found.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
