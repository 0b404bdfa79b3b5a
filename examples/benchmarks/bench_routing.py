r"""Policies for choosing an instance, compared: Lockstep's, vLLM's two scores, SGLang's, and round robin.

    python examples/benchmarks/bench_routing.py --sizes 8 --seeds 0 1 2 \
        --output-json build/routing.json --plots build

simulates: the schedulers, block pools, reports, prefix index and chooser are Lockstep's own, only the model
is replaced by a clock (``examples/benchmarks/routing/``). ``--real`` instead sends loads to a real mesh of
``-dp`` instances: smaller ones to the shipped model, or with ``--waiting`` the same ones to instances that
wait instead of computing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.benchmarks.routing.baselines import BASELINES
from examples.benchmarks.routing.cluster import Cluster, Machine, StepTime
from examples.benchmarks.routing.report import KEY, POLICIES, Result, key_of, plot, summary, table, verdict
from examples.benchmarks.routing.small_loads import HOST_LOADS, NUM_BLOCKS, NUM_SEQS, NUM_TOKENS
from examples.benchmarks.routing.workloads import LOADS, SMALLER
from router.dispatch.policy import Policy

if TYPE_CHECKING:
    from examples.benchmarks.routing.real import Steps

GPU = StepTime("a GPU", 0.008, 30e-6, 40e-9)
"""Step time of about an 8B model on one H100.

8 ms of launches and weights, 33,000 tokens/s, 40 ns per cached token.
"""


class Job(NamedTuple):
    """One policy under one load made from one seed."""

    load: str
    policy: str
    instances: int
    seed: int
    time: StepTime
    scale: float = 1.0
    """Factor by which arrivals are slowed down."""
    cores: float | None = None
    """Cores that all instances share, for loads of one host.

    None: each instance has its own machine.
    """
    seconds: float = 0.0
    rate: float = 0.0
    """Requests per second of a load for one host."""

    def key(self) -> dict[str, Any]:
        return key_of(self.time.name, self.load, self.policy, self.instances, self.seed)


def simulated(job: Job) -> dict[str, Any]:
    rng = random.Random(job.seed)
    if job.cores is None:
        load = LOADS[job.load](rng, job.instances, job.scale)
        machine = Machine(job.time, **SMALLER.get(job.load, {}))
    else:
        load = HOST_LOADS[job.load](rng, job.seconds, job.rate)
        machine = Machine(job.time, NUM_BLOCKS, NUM_SEQS, NUM_TOKENS, job.cores)
    cluster = Cluster(job.policy, job.instances, machine)
    outcomes = cluster.run(load)
    return {**job.key(), **summary(outcomes, cluster.computed_tokens)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[8], help="numbers of instances")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=[Policy.PREFIX_AWARE.value, *BASELINES],
        help="unset: the default one and those of others",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="loads are made from these")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--measure", metavar="MODEL", help="measure steps of this model here; unset: a GPU's")
    parser.add_argument("--cores", type=float, help="instances share so many, under the loads of --real")
    parser.add_argument("--slowdown", type=float, default=1.0, help="of the steps, with --cores")
    parser.add_argument("--real", action="store_true", help="real meshes of the shipped model instead")
    parser.add_argument(
        "--waiting",
        type=float,
        metavar="FACTOR",
        help="with --real: steps take as long as in the simulation, times this, and compute nothing",
    )
    parser.add_argument("-dp", type=int, default=2, help="instances, with --real")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run, with --real or --cores")
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second in all, likewise")
    parser.add_argument("--repeats", type=int, default=1, help="of each run, with --real")
    parser.add_argument("--output-json", type=Path, help="what is in this file is not run again")
    parser.add_argument("--again", action="store_true", help="run and replace what is in the file")
    parser.add_argument("--show", action="store_true", help="only show and plot what is in the file")
    parser.add_argument("--plots", type=Path, help="directory for pictures (needs matplotlib)")
    options = parser.parse_args()
    if options.show:
        results = _known(options.output_json)["results"]
    elif options.real:
        results = asyncio.run(_real(options))
    else:
        results = _simulate(options)
    print(table(results), "", *verdict(results), sep="\n")
    if options.plots:
        plot(results, options.plots)
    return 0


def _known(file: Path | None) -> dict[str, Any]:
    if file is None or not file.exists():
        return {"step_seconds": {}, "results": []}
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _save(file: Path | None, found: dict[str, Any]) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")


def _step_time(model: str | None, known: dict[str, Any]) -> StepTime:
    """A GPU's step time, or that of a model here, measured once per results file."""
    if model is None:
        return GPU
    name = f"{model} on this CPU"
    if name in known:
        return StepTime(name, **known[name])
    from examples.benchmarks.routing.step_time import measure

    return measure(model)


def _simulate(options: argparse.Namespace) -> list[Result]:
    known = _known(options.output_json)
    time = _step_time(options.measure, known["step_seconds"])
    known["step_seconds"][time.name] = {
        "base": time.base,
        "per_token": time.per_token,
        "per_context": time.per_context,
    }
    scale = time.per_token / GPU.per_token
    if options.cores is not None:
        time = time.on_shared(options.cores, options.slowdown)
    if options.measure and options.cores is None:
        print(f"{time}; arrivals slowed down {scale:.1f} times, like the tokens")
    jobs = [
        Job(load, policy, size, seed, time, scale, options.cores, options.seconds, options.rate)
        for size in options.sizes
        for load in options.loads
        if options.cores is None or load in HOST_LOADS
        for seed in options.seeds
        for policy in options.policies
    ]
    results: list[Result] = known["results"]
    if not options.again:
        jobs = [job for job in jobs if _place(results, job.key()) is None]
    with multiprocessing.Pool(options.jobs) as workers:
        for result in workers.imap(simulated, jobs):
            _take(known, result, options.output_json)
    return results


async def _real(options: argparse.Namespace) -> list[Result]:
    from examples.benchmarks.routing.real import shipped_model, waiting

    if options.waiting is None:
        return await _compare(options, shipped_model(options.seconds, options.rate))
    with waiting(_step_time(options.measure, {}), options.waiting) as steps:
        return await _compare(options, steps)


async def _compare(options: argparse.Namespace, steps: Steps) -> list[Result]:
    from examples.benchmarks.routing.real import RealJob, compare

    known = _known(options.output_json)
    wanted = [
        RealJob(steps.name, load, policy, options.dp, seed, repeat)
        for load in options.loads
        if load in steps.loads
        for seed in options.seeds
        for repeat in range(options.repeats)
        for policy in options.policies
    ]
    if not options.again:
        wanted = [job for job in wanted if _place(known["results"], job.key()) is None]
    async for result in compare(wanted, steps):
        _take(known, result, options.output_json)
    return list(known["results"])


def _place(results: list[Result], key: dict[str, Any]) -> int | None:
    return next((place for place, each in enumerate(results) if key.items() <= each.items()), None)


def _take(known: dict[str, Any], result: Result, file: Path | None) -> None:
    """Add a result, or replace an earlier one of the same run."""
    results = known["results"]
    place = _place(results, {name: result[name] for name in KEY})
    if place is None:
        results.append(result)
    else:
        results[place] = result
    _save(file, known)
    print(
        f"{result['load']:14} {result['instances']:3} {result['policy']:20} seed {result['seed']}  "
        f"p50 {result['ttft_p50']:9.1f}  p99 {result['ttft_p99']:9.1f}  hit {result['hit_rate']:.3f}  "
        f"busiest {result['balance']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
