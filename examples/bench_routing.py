"""Policies for choosing an instance, compared: Lockstep's, vLLM's two scores, SGLang's, and round robin.

    python examples/bench_routing.py --sizes 8 64 --output-json docs/results/routing.json --plots docs/images

simulates: the schedulers, block pools, reports, prefix index and chooser are Lockstep's own, only the model
is replaced by a clock (``examples/routing/``). ``--real`` instead sends a hot-prefix load to real meshes of
``-dp`` instances of the shipped model, one for each of Lockstep's policies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.routing.baselines import BASELINES
from examples.routing.cluster import Cluster, Machine, Outcome, StepTime
from examples.routing.workloads import LOADS
from router.policy import Policy

POLICIES = [policy.value for policy in Policy] + list(BASELINES)
GPU = StepTime("a GPU", 0.008, 30e-6, 40e-9)
"""About an 8B model on one H100: 8 ms of launches and weights, 33,000 tokens/s, 40 ns per cached token."""


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def summary(outcomes: Sequence[Outcome], balance: float) -> dict[str, float]:
    """Times in milliseconds."""
    ttft = [1000 * (each.first_token - each.arrival) for each in outcomes]
    latency = [1000 * (each.end - each.arrival) for each in outcomes]
    return {
        "requests": len(outcomes),
        "ttft_p50": percentile(ttft, 0.5),
        "ttft_p99": percentile(ttft, 0.99),
        "ttft_mean": sum(ttft) / len(ttft),
        "latency_p50": percentile(latency, 0.5),
        "hit_rate": sum(each.cached_tokens for each in outcomes)
        / sum(each.prompt_tokens for each in outcomes),
        "balance": balance,
        "moves": sum(each.moves for each in outcomes),
    }


def simulated(job: tuple[str, str, int, int, Machine, float]) -> dict[str, Any]:
    """One policy under one load, all seeds together."""
    load, policy, size, seeds, machine, scale = job
    outcomes: list[Outcome] = []
    balances = []
    for seed in range(seeds):
        cluster = Cluster(policy, size, machine)
        outcomes += cluster.run(LOADS[load](random.Random(seed), size, scale))
        computed = cluster.computed_tokens
        balances.append(max(computed) * len(computed) / sum(computed))
    found = summary(outcomes, sum(balances) / len(balances))
    return {"load": load, "policy": policy, "instances": size, "seeds": seeds, **found}


def verdict(results: Sequence[dict[str, Any]]) -> list[str]:
    """How far prefix_aware is from the best of what other servers do."""
    lines = []
    for load, size in sorted({(each["load"], each["instances"]) for each in results}):
        compared = {"prefix_aware", *BASELINES}
        here = {
            each["policy"]: each
            for each in results
            if (each["load"], each["instances"]) == (load, size) and each["policy"] in compared
        }
        for figure in ("ttft_p50", "ttft_p99"):
            best = min(here, key=lambda policy: here[policy][figure])
            ratio = here["prefix_aware"][figure] / here[best][figure]
            mark = "ok" if ratio <= 1.03 else "WORSE"
            lines.append(f"{load:14} {size:3} instances  {figure}: {ratio:6.3f} of the best ({best})  {mark}")
    return lines


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = []
    for load, size in sorted({(each["load"], each["instances"]) for each in results}):
        lines += [
            "",
            f"{load}, {size} instances",
            "| policy | TTFT p50 ms | TTFT p99 ms | hit rate | busiest / mean |",
            "|---|---|---|---|---|",
        ]
        for each in results:
            if (each["load"], each["instances"]) == (load, size):
                lines.append(
                    f"| {each['policy']} | {each['ttft_p50']:.1f} | {each['ttft_p99']:.1f} | "
                    f"{each['hit_rate']:.3f} | {each['balance']:.2f} |"
                )
    return "\n".join(lines)


def plot(results: Sequence[dict[str, Any]], directory: Path) -> None:
    """One picture per number of instances: p50, p99 and hit rate by load and policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    figures = {"ttft_p50": "TTFT p50, ms", "ttft_p99": "TTFT p99, ms", "hit_rate": "prefix cache hit rate"}
    for size in sorted({each["instances"] for each in results}):
        here = [each for each in results if each["instances"] == size]
        loads = list(dict.fromkeys(each["load"] for each in here))
        policies = list(dict.fromkeys(each["policy"] for each in here))
        drawing, axes = pyplot.subplots(len(figures), 1, figsize=(11, 10), layout="constrained")
        for axis, (figure, title) in zip(axes, figures.items(), strict=True):
            for place, policy in enumerate(policies):
                values = [each[figure] for each in here if each["policy"] == policy]
                positions = [number + place * 0.8 / len(policies) for number in range(len(loads))]
                axis.bar(positions, values, 0.8 / len(policies), label=policy)
            axis.set_title(title, loc="left")
            axis.set_xticks([number + 0.35 for number in range(len(loads))], loads)
            if figure != "hit_rate":
                axis.set_yscale("log")
            axis.spines[["top", "right"]].set_visible(False)
        handles, names = axes[0].get_legend_handles_labels()
        drawing.legend(handles, names, ncols=5, fontsize=9, loc="outside lower center")
        drawing.suptitle(f"{size} instances, simulated with Lockstep's scheduler")
        drawing.savefig(directory / f"routing-{size}.png", dpi=80)
        pyplot.close(drawing)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[8], help="numbers of instances")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, counted together")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--measure", metavar="MODEL", help="measure steps of this model here; unset: a GPU's")
    parser.add_argument("--real", action="store_true", help="real meshes of the shipped model instead")
    parser.add_argument("-dp", type=int, default=2, help="instances, with --real")
    parser.add_argument("--requests", type=int, default=120, help="with --real")
    parser.add_argument("--output-json", type=Path, help="results are added to those in this file")
    parser.add_argument("--show", action="store_true", help="only show and plot what is in the file")
    parser.add_argument("--plots", type=Path, help="directory for pictures (needs matplotlib)")
    options = parser.parse_args()
    if options.show:
        results = json.loads(options.output_json.read_text())["results"]
        print(table(results), "", *verdict(results), sep="\n")
        if options.plots:
            plot(results, options.plots)
        return 0
    if options.real:
        from examples.routing.real import compare

        names = [name for name in options.policies if name not in BASELINES]
        _save(options.output_json, asyncio.run(compare(names, options.dp, options.requests)))
        return 0
    results = _simulate(options)["results"]
    print(table(results), "", *verdict(results), sep="\n")
    if options.plots:
        plot(results, options.plots)
    return 0


def _added(before: list[dict[str, Any]], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of other runs in the same file stay, unless they are of the same policy, load and size."""
    keys = ("load", "policy", "instances")
    return [each for each in before if any(each[key] != result[key] for key in keys)] + [result]


def _save(file: Path | None, found: dict[str, Any]) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")


def _simulate(options: argparse.Namespace) -> dict[str, Any]:
    time, scale = GPU, 1.0
    if options.measure:
        from examples.routing.step_time import measure

        time = measure(options.measure)
        scale = time.per_token / GPU.per_token
        print(f"{time}; arrivals slowed down {scale:.1f} times, like the tokens")
    machine = Machine(time)
    jobs = [
        (load, policy, size, options.seeds, machine, scale)
        for size in options.sizes
        for load in options.loads
        for policy in options.policies
    ]
    step = {
        "name": time.name,
        "base": time.base,
        "per_token": time.per_token,
        "per_context": time.per_context,
    }
    results: list[dict[str, Any]] = []
    if options.output_json and options.output_json.exists():
        results = json.loads(options.output_json.read_text())["results"]
    with multiprocessing.Pool(options.jobs) as workers:
        for result in workers.imap(simulated, jobs):
            results = _added(results, result)
            _save(options.output_json, {"step_seconds": step, "results": results})
            print(
                f"{result['load']:14} {result['instances']:3} {result['policy']:20} "
                f"p50 {result['ttft_p50']:9.1f}  p99 {result['ttft_p99']:9.1f}  hit {result['hit_rate']:.3f}",
                flush=True,
            )
    return {"results": results}


if __name__ == "__main__":
    sys.exit(main())
