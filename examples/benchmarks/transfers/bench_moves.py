#!/usr/bin/env python3
"""Simulation of running requests that are moved to less busy instances, against not moving them.

    python examples/benchmarks/transfers/bench_moves.py --instances 8 64

Engine cores, the router's chooser and the rebalancing run in one process with a virtual clock. Only the model
and the wires are times. Arrivals are random, answers have lengths of a heavy tail. Some instances may join
late.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from coordinator.messages import State
from engine.core import EngineCore
from engine.messages import Delta, Tokens
from engine.pieces.pool import hash_block
from examples.benchmarks.routing.cluster import DELAY, PEER, Cluster, Machine, StepTime, _Node
from examples.benchmarks.routing.workloads import Arrival, words
from examples.benchmarks.transfers.rebalancing import Rebalancer, Removal
from router.dispatch.ledger import Address, Entry
from router.dispatch.pool import PooledInstance

MACHINES = {
    "gpu": Machine(StepTime("a GPU", 0.008, 30e-6, 40e-9)),
    "small caches": Machine(StepTime("a GPU", 0.008, 30e-6, 40e-9), num_blocks=768),
    "cpu": Machine(StepTime("dense-0.5b on a CPU", 0.06, 4e-3, 1e-6), num_blocks=2048),
}
TOKEN_SECONDS = {"gpu": 131_072 / 5e9, "small caches": 131_072 / 5e9, "cpu": 114_688 / 5e8}
"""Seconds that a token's keys and values take from one instance to another."""
MEDIAN_PROMPT, MEDIAN_ANSWER, SPREAD = 200, 120, 1.1


class HandOver(msgspec.Struct, frozen=True):
    """A request goes no further at an instance from its next step on."""

    removal: Removal
    address: Address


class MovingCluster(Cluster):
    """A cluster in which running requests may be moved."""

    def __init__(
        self, num_instances: int, machine: Machine, token_seconds: float, *, rebalances: bool, late: int
    ) -> None:
        """``late``: instances that join only when half of the load has come."""
        super().__init__("prefix_aware", num_instances, machine)
        for instance in self._pool:
            assert instance.capacity is not None
            instance.capacity = msgspec.structs.replace(
                instance.capacity, blocks_at=instance.name, cache_identity="one"
            )
        self._late = list(self._pool)[:late]
        for instance in self._late:
            instance.member = msgspec.structs.replace(instance.member, state=State.LOADED)
        self._rebalancer = Rebalancer(self._pool, self._ledger)
        self._rebalances, self._token_seconds = rebalances, token_seconds
        self._last: dict[Entry, float] = {}
        self.gaps: list[float] = []
        """Seconds between each two tokens of all requests."""
        self.moved = self.lost = 0
        """Requests that were moved, and tokens of these that were computed again."""

    def join_at(self, when: float) -> None:
        """Let the late instances join."""
        self._at(when, self._join)

    def _join(self) -> None:
        for instance in self._late:
            instance.member = msgspec.structs.replace(instance.member, state=State.READY)

    def _receive(self, name: str, message: Any) -> None:
        super()._receive(name, message)
        if self._rebalances and isinstance(message, Tokens):
            for removal in self._rebalancer.removals(self._now):
                address = removal.entry.address
                assert address is not None
                copying = removal.entry.work * self._token_seconds
                self._at(
                    self._now + copying,
                    lambda removal=removal, address=address: self._deliver(
                        removal.source.name, HandOver(removal, address)
                    ),
                )

    def _take(self, instance: PooledInstance, delta: Delta) -> None:
        entry = self._ledger.find(instance.name, delta.request)
        if entry is None:
            return
        if entry in self._last:
            self.gaps.append(self._now - self._last[entry])
        self._last[entry] = self._now
        super()._take(instance, delta)
        if delta.finish_reason is not None:
            del self._last[entry]
            self._rebalancer.ended(entry, self._now)

    def _step(self, name: str, node: _Node) -> None:
        for message in [each for each in node.inbox if isinstance(each, HandOver)]:
            node.inbox.remove(message)
            node.core.abort(PEER, [message.address[1]])
            self._at(self._now + DELAY, lambda message=message: self._handed_over(message))
        super()._step(name, node)

    def _handed_over(self, message: HandOver) -> None:
        entry, _, target = message.removal
        if entry.address != message.address:
            self._rebalancer.ended(entry, self._now)
            return
        self.moved += 1
        core = self._nodes[target.name].core
        self.lost += entry.work - 1 - have(core, entry.prompt.prompt_ids + entry.emitted)
        entry.owed = True
        number = self._chooser.dispatch(entry, target, self._now)
        self._outcomes[entry].rank = target.rank
        self._deliver(target.name, entry.submit(number, copy=1))
        self._rebalancer.ended(entry, self._now)


def have(core: EngineCore, tokens: Sequence[int]) -> int:
    """Put the blocks of a request into an instance's cache.

    Returns the tokens that are there.
    """
    size, pool = core.reports.capacity.block_size, core.pool
    full, rest = divmod(len(tokens) - 1, size)
    names: list[bytes] = []
    for start in range(0, full * size, size):
        names.append(hash_block(names[-1] if names else None, tokens[start : start + size]))
    known = len(pool.find_prefix(names))
    blocks = pool.take(full - known + bool(rest))
    if blocks is None:
        return known * size
    for block, name in zip(blocks, names[known:], strict=False):
        pool.name(block, name)
    if rest:
        pool.parts.name(
            blocks[-1], hash_block(names[-1] if names else None, tokens[full * size : full * size + rest])
        )
    pool.release(blocks)
    return len(tokens) - 1


def load_of(chance: random.Random, seconds: float, rate: float) -> list[Arrival]:
    """Requests whose prompts and answers are log-normal."""
    found, at = [], 0.0
    while (at := at + chance.expovariate(rate)) < seconds:
        prompt, answer = (
            max(8, min(2000, round(math.exp(chance.gauss(math.log(median), SPREAD)))))
            for median in (MEDIAN_PROMPT, MEDIAN_ANSWER)
        )
        found.append(Arrival(at, words(chance, prompt), answer))
    return found


def figures(values: Sequence[float]) -> dict[str, float]:
    """Mean and 99th percentile in milliseconds."""
    ordered = sorted(values)
    return {
        "mean": 1000 * statistics.fmean(ordered),
        "p99": 1000 * ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))],
    }


def run(args: argparse.Namespace, kind: str, size: int, seed: int, *, rebalances: bool) -> dict[str, Any]:
    late = round(args.late * size)
    cluster = MovingCluster(size, MACHINES[kind], TOKEN_SECONDS[kind], rebalances=rebalances, late=late)
    if late:
        cluster.join_at(args.seconds / 2)
    load = load_of(random.Random(seed), args.seconds, args.rate[kind] * size)
    outcomes = cluster.run(load)
    ends = [each.end - each.arrival for each in outcomes]
    firsts = [each.first_token - each.arrival for each in outcomes]
    return {
        "machine": kind, "instances": size, "seed": seed, "late": late, "rebalances": rebalances,
        "requests": len(outcomes), "moved": cluster.moved, "computed_again": cluster.lost,
        "latency": figures(ends), "first_token": figures(firsts), "between_tokens": figures(cluster.gaps),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--instances", type=int, nargs="+", default=[8], help="sizes of the mesh (default: 8)")
    add("--machines", nargs="+", choices=MACHINES, default=list(MACHINES), help="kinds (default: both)")
    add("--seconds", type=float, default=60.0, help="virtual time of arrivals (default: %(default)s)")
    add(
        "--late",
        type=float,
        default=0.0,
        help="part of the instances that join after half of it (default: 0)",
    )
    add("--seeds", type=int, default=2, help="loads (default: %(default)s)")
    add("--gpu-rate", type=float, default=9.0, help="requests a second per GPU (default: %(default)s)")
    add("--cpu-rate", type=float, default=0.25, help="the same per CPU (default: %(default)s)")
    add("--output-json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    args.rate = {"gpu": args.gpu_rate, "small caches": args.gpu_rate, "cpu": args.cpu_rate}
    results = []
    for kind in args.machines:
        for size in args.instances:
            for seed in range(args.seeds):
                stays, moves = (run(args, kind, size, seed, rebalances=each) for each in (False, True))
                results += [stays, moves]
                parts = [
                    f"{what} {figure} {moves[what][figure] / stays[what][figure]:.3f}"
                    for what in ("latency", "first_token", "between_tokens")
                    for figure in ("mean", "p99")
                ]
                text = f"{kind} x {size}, seed {seed}: {moves['moved']} of {moves['requests']} moved;"
                print(text, "over not moving:", ", ".join(parts), flush=True)
    if args.output_json:
        args.output_json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
