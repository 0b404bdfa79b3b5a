"""``python -m tests.simulator.elastic SEED`` shows a schedule; ``--schedules N`` runs N of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from tests.simulator.elastic.apart import simulate_apart
from tests.simulator.elastic.balanced import simulate_balanced
from tests.simulator.elastic.ordered import simulate_ordered
from tests.simulator.elastic.paused import simulate_paused
from tests.simulator.elastic.world import simulate
from tests.simulator.schedule import Violation

CHUNK = 250
KINDS = {
    "plain": simulate, "balanced": simulate_balanced, "apart": simulate_apart, "paused": simulate_paused,
    "ordered": simulate_ordered,
}  # fmt: skip


def run_chunk(first: int, count: int, kind: str) -> tuple[Counter[str], str | None]:
    """Run some schedules; what came up in them, and the first violation."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            counts += KINDS[kind](seed).checker.counts
        except Violation as violation:
            return counts, "\n".join([str(violation), *violation.__notes__])
    return counts, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="show this schedule")
    parser.add_argument("--schedules", type=int, default=50_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--balanced", action="store_true", help="with experts that move for their load")
    kinds.add_argument("--ordered", action="store_true", help="with new weights, sleeps and pauses")
    kinds.add_argument("--paused", action="store_true", help="with operators who pause the mesh")
    kinds.add_argument(
        "--apart", action="store_true", help="with real cores and tokens, partial ways and own clocks"
    )
    args = parser.parse_args()
    kind = next((kind for kind in KINDS if getattr(args, kind, False)), "plain")
    if args.seed is not None:
        world = KINDS[kind](args.seed)
        print(world.report(args.seed, most_lines=100_000))
        return 0
    began = time.monotonic()
    counts: Counter[str] = Counter()
    firsts = range(args.first, args.first + args.schedules, CHUNK)
    sizes = [min(CHUNK, args.first + args.schedules - first) for first in firsts]
    with ProcessPoolExecutor(args.jobs) as pool:
        for some, violation in pool.map(run_chunk, firsts, sizes, repeat(kind)):
            counts += some
            if violation is not None:
                print(violation)
                return 1
    took = time.monotonic() - began
    print(f"{args.schedules} schedules with faults, no violation, {took:.0f} s")
    for name, count in sorted(counts.items()):
        print(f"{count:9d} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
