#!/usr/bin/env python3
"""Exactness of a link between two network namespaces, and its cost (needs root).

    sudo .venv/bin/python examples/benchmarks/links/measure_link.py
    sudo .venv/bin/python examples/benchmarks/links/measure_link.py --links 50:10 200:10 --repeats 2000

For each link: microseconds of one way of a small message between processes that look and between ones that
sleep (half of a round trip: the 10th, 50th and 90th percentile), the same of 64 KiB beside what delay and
rate make of it, and the rate of a stream. Of a link that is emulated also the share of a core that it took
during the small messages and during the stream, and packets that were dropped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.bench_lockstep import print_table
from examples.benchmarks.links.netns import Link, Network, exit_unless_possible, link_of, network
from router.tools.bench.report import machine

SMALL, LARGE = 64, 64 << 10
STREAM_SECONDS = 0.3
UNBOUNDED_GBITS = 10.0
"""Rate by which bytes of a stream are chosen where the link has none."""


def one_way(net: Network, num_bytes: int, waiting: str, repeats: int) -> list[float]:
    """Percentiles 10, 50 and 90 of one way, in microseconds."""
    (seconds,) = net.probe(sizes=(num_bytes,), waiting=waiting, repeats=repeats)
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return [1e6 * tenths[at] / 2 for at in (0, 4, 8)]


def core(net: Network) -> tuple[float, int]:
    """Share of a core that the emulator took since the last call; dropped packets."""
    counts = net.counts()
    if not counts:
        return 0.0, 0
    dropped = sum(each["dropped"] for each in counts["directions"])
    return counts["processor_seconds"] / counts["seconds"], dropped


def measured(net: Network, link: Link, repeats: int) -> dict[str, float | str | Sequence[float]]:
    net.set(link)
    core(net)
    found = {"link": str(link), "looking": one_way(net, SMALL, "looking", repeats)}
    found["sleeping"] = one_way(net, SMALL, "sleeping", repeats)
    found["small_core"], _ = core(net)
    found["large"] = one_way(net, LARGE, "looking", max(10, repeats // 4))
    found["large_expected"] = 1e6 * link.seconds(LARGE)
    core(net)
    num_bytes = int(STREAM_SECONDS * (link.gbits or UNBOUNDED_GBITS) * 1e9 / 8)
    (seconds,) = net.probe("stream", (num_bytes,), repeats=3)
    found["stream_gbits"] = 8 * num_bytes / statistics.median(seconds) / 1e9
    found["stream_core"], found["dropped"] = core(net)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    links = [Link(), Link(50), Link(200), Link(50, 1), Link(50, 10), Link(200, 1), Link(200, 10)]
    parser.add_argument("--links", nargs="+", type=link_of, default=links, help="DELAY_US[:GBITS]")
    parser.add_argument("--repeats", type=int, default=1000, help="round trips (default: %(default)s)")
    parser.add_argument("--output-json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    exit_unless_possible()
    with network() as net:
        rows = [measured(net, link, args.repeats) for link in args.links]
        kind = "emulated" if net.is_emulated else "netem"
    print(f"{kind} link, {args.repeats} round trips; one way in us: p10 / p50 / p90\n")
    titles = ["link", "64 B looking", "64 B sleeping", "64 KiB looking", "expected", "stream Gbit/s"]
    titles += ["core, small", "core, stream", "dropped"]

    def three(values: Sequence[float]) -> str:
        return " / ".join(f"{value:.0f}" for value in values)

    print_table(
        titles,
        [
            [
                row["link"],
                *(three(row[key]) for key in ("looking", "sleeping", "large")),
                f"{row['large_expected']:.0f}",
                *(f"{row[key]:.2f}" for key in ("stream_gbits", "small_core", "stream_core")),
                str(row["dropped"]),
            ]
            for row in rows
        ],
    )
    if args.output_json is not None:
        page = {"machine": machine(), "link": kind, "results": rows}
        args.output_json.write_text(json.dumps(page, indent=1) + "\n")


if __name__ == "__main__":
    main()
