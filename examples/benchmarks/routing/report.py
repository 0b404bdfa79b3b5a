"""Results of the comparison: medians over seeds, a verdict, a table and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from examples.benchmarks.routing.baselines import BASELINES
from examples.benchmarks.routing.outcome import Outcome
from examples.benchmarks.routing.workloads import LOADS
from router.dispatch.policy import Policy

Result = dict[str, Any]
"""One run of a policy under a seeded load, for a number of instances."""
KEY = ("steps", "load", "policy", "instances", "seed", "repeat")
"""Fields that identify a run in a file of results.

``steps``: whose they are, a machine's name.
"""
POLICIES = list(dict.fromkeys([*map(str, Policy), *BASELINES]))  # round robin is in both
MOST_BEHIND = 1.03
REAL = "real instances"
"""End of the name of steps that real instances took."""
FIGURES = ("ttft_p50", "ttft_p99")


def key_of(steps: str, load: str, policy: str, instances: int, seed: int, repeat: int = 0) -> dict[str, Any]:
    return dict(zip(KEY, (steps, load, policy, instances, seed, repeat), strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def summary(outcomes: Sequence[Outcome], computed: Sequence[int]) -> dict[str, float]:
    """Summary of outcomes, with times in milliseconds."""
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
        "balance": max(computed) * len(computed) / sum(computed),
        "moves": sum(each.moves for each in outcomes),
    }


def groups(results: Sequence[Result]) -> dict[tuple[str, int, str], list[Result]]:
    """Results by kind of steps, number of instances, and load."""
    found: dict[tuple[str, int, str], list[Result]] = {}
    for each in sorted(results, key=_place):
        found.setdefault((each["steps"], each["instances"], each["load"]), []).append(each)
    return found


def _place(result: Result) -> tuple[str, int, int, int]:
    load, policy = list(LOADS).index(result["load"]), POLICIES.index(result["policy"])
    return result["steps"], result["instances"], load, policy


def ratios(here: Sequence[Result], figure: str, others: Iterable[str]) -> list[float]:
    """Ratio of prefix_aware's figure to that of the best other policy, by seed and run."""
    seeds: dict[tuple[int, int], dict[str, float]] = {}
    for each in here:
        seeds.setdefault((each["seed"], each["repeat"]), {})[each["policy"]] = each[figure]
    compared = [
        values
        for values in seeds.values()
        if "prefix_aware" in values and any(name in values for name in others)
    ]
    return [
        values["prefix_aware"] / min(values[name] for name in ("prefix_aware", *others) if name in values)
        for values in compared
    ]


def to_best(here: Sequence[Result], figure: str, others: Iterable[str]) -> float | None:
    """How far prefix_aware is from the best; None if it was not compared.

    Simulated: the median over the seeds of its ratio to the best of each seed. Real: its median over the runs
    to the lowest of the others' medians, as the lowest of several single runs is below each of them even
    where all policies choose alike.
    """
    if not here[0]["steps"].endswith(REAL):
        found = ratios(here, figure, others)
        return median(found) if found else None
    runs: dict[str, list[float]] = {}
    for each in here:
        runs.setdefault(each["policy"], []).append(each[figure])
    middle = {policy: median(values) for policy, values in runs.items()}
    compared = [middle[name] for name in others if name in middle]
    if "prefix_aware" not in middle or not compared:
        return None
    return middle["prefix_aware"] / min(middle["prefix_aware"], *compared)


def noise(here: Sequence[Result], figure: str) -> float | None:
    """Median ratio of the larger to the smaller figure of repeated runs.

    Runs have the same policy and seed. None if nothing was run twice.
    """
    runs: dict[tuple[int, str], list[float]] = {}
    for each in here:
        runs.setdefault((each["seed"], each["policy"]), []).append(each[figure])
    found = [max(values) / min(values) for values in runs.values() if len(values) > 1]
    return median(found) if found else None


def verdict(results: Sequence[Result]) -> list[str]:
    """How far prefix_aware is from the best of other servers' policies.

    The rule allows at most 1.03 times.
    """
    lines = []
    for (steps, size, load), here in groups(results).items():
        for figure in FIGURES:
            found = ratios(here, figure, BASELINES)
            overall = to_best(here, figure, BASELINES)
            if overall is None:
                continue
            lowest = {
                name: median(each[figure] for each in here if each["policy"] == name)
                for name in BASELINES
                if any(each["policy"] == name for each in here)
            }
            best = min(lowest, key=lambda name: lowest[name])
            mark = "ok" if overall <= MOST_BEHIND else "WORSE"
            again = noise(here, figure)
            again_text = "" if again is None else f"; two runs of the same differ {again:.2f} times"
            lines.append(
                f"{steps:12.12} {size:3} instances  {load:14} {figure}: {overall:.3f} of the best "
                f"({min(found):.3f} to {max(found):.3f}, {len(found)} seeds; best other {best}{again_text})  "
                f"{mark}"
            )
    return lines


def table(results: Sequence[Result]) -> str:
    """Markdown tables, one for each number of instances and kind of steps.

    Each policy has a row; each cell has medians over the seeds. The last row has the verdict's ratios, with
    those of single seeds.
    """
    found = groups(results)
    lines = []
    for steps, size in dict.fromkeys((steps, size) for steps, size, _ in found):
        loads = [load for each_steps, each_size, load in found if (each_steps, each_size) == (steps, size)]
        policies = dict.fromkeys(each["policy"] for load in loads for each in found[steps, size, load])
        seeds = {each["seed"] for load in loads for each in found[steps, size, load]}
        lines += ["", f"{size} instances, steps of {steps}, {len(seeds)} seeds:", ""]
        lines += ["| policy | " + " | ".join(loads) + " |", "|---" * (len(loads) + 1) + "|"]
        for policy in policies:
            cells = [_cell(found[steps, size, load], policy) for load in loads]
            lines.append(f"| {policy} | " + " | ".join(cells) + " |")
        cells = [_ratio_cell(found[steps, size, load]) for load in loads]
        lines.append("| *prefix_aware to the best* | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(here: Sequence[Result], policy: str) -> str:
    runs = [each for each in here if each["policy"] == policy]
    if not runs:
        return ""
    p50, p99, hits, balance = (
        median(each[figure] for each in runs) for figure in (*FIGURES, "hit_rate", "balance")
    )
    return f"{p50:.0f} / {p99:.0f} ({hits:.2f}, {balance:.2f})"


def _ratio_cell(here: Sequence[Result]) -> str:
    parts = []
    for figure in FIGURES:
        found, overall = ratios(here, figure, BASELINES), to_best(here, figure, BASELINES)
        if overall is not None:
            spread = f" [{min(found):.2f}, {max(found):.2f}]" if len(found) > 1 else ""
            again = noise(here, figure)
            parts.append(f"{overall:.3f}{spread}" + (f" ±{again:.2f}x" if again is not None else ""))
    return " / ".join(parts)


def plot(results: Sequence[Result], directory: Path) -> None:
    """One picture per number of instances and kind of steps.

    It shows p50, p99 and hit rate by load and policy, as medians over the seeds.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    figures = {"ttft_p50": "TTFT p50, ms", "ttft_p99": "TTFT p99, ms", "hit_rate": "prefix cache hit rate"}
    found = groups(results)
    for steps, size in dict.fromkeys((steps, size) for steps, size, _ in found):
        loads = [load for each_steps, each_size, load in found if (each_steps, each_size) == (steps, size)]
        policies = list(dict.fromkeys(each["policy"] for load in loads for each in found[steps, size, load]))
        drawing, axes = pyplot.subplots(len(figures), 1, figsize=(11, 10), layout="constrained")
        for axis, (figure, title) in zip(axes, figures.items(), strict=True):
            for place, policy in enumerate(policies):
                bars = {}
                for number, load in enumerate(loads):
                    values = [each[figure] for each in found[steps, size, load] if each["policy"] == policy]
                    if values:
                        bars[number + place * 0.8 / len(policies)] = median(values)
                axis.bar(list(bars), list(bars.values()), 0.8 / len(policies), label=policy)
            axis.set_title(title, loc="left")
            axis.set_xticks([number + 0.35 for number in range(len(loads))], loads)
            if figure != "hit_rate":
                axis.set_yscale("log")
            axis.spines[["top", "right"]].set_visible(False)
        handles, names = axes[0].get_legend_handles_labels()
        drawing.legend(handles, names, ncols=5, fontsize=9, loc="outside lower center")
        drawing.suptitle(f"{size} instances, steps of {steps}")
        name = re.sub(r"\W+", "-", f"routing {steps.removeprefix('a GPU')} {size}").strip("-").lower()
        drawing.savefig(directory / f"{name}.png", dpi=80)
        pyplot.close(drawing)
