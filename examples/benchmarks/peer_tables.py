"""Tables and plots of what ``bench_peers.py`` measured, in whole or in part.

The input is its page: what its JSON holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.benchmarks.bench_lockstep import print_table, spread
from examples.benchmarks.peer_systems import SYSTEMS

Page = dict[str, Any]
Runs = dict[tuple[str, int], list[dict[str, Any]]]
"""Runs of one workload, by system and concurrency."""

SPEED, FIRST = "tokens_per_second", "ttft_ms"
MEASURES = {SPEED: ("output tokens/s", 0), FIRST: ("TTFT p50, ms", 0), "itl_ms": ("ITL p50, ms", 1)}
"""Title and digits of a table by the key of a run."""


def print_model(model: Page) -> None:
    """Print all tables of one model."""
    calibration = " and ".join(
        f"{one['read_gb_per_s']} GB/s, {one['bf16_gflop_per_s']} GFLOP/s" for one in model["calibration"]
    )
    print(f"\n## {model['model']}, {model['dtype']}\n\nThe machine before and after: {calibration}.")
    print(f"Seconds to start: {model['start_seconds']}")
    for name, why in model["left_out"].items():
        print(f"Left out: {name} {why.splitlines()[0]}")
    for workload in dict.fromkeys(cell["workload"] for cell in model["cells"]):
        print_workload(workload, model)


def print_workload(workload: str, model: Page) -> None:
    cells = [cell for cell in model["cells"] if cell["workload"] == workload]
    of: Runs = {(cell["system"], cell["concurrency"]): cell["runs"] for cell in cells}
    systems, counts = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("system", "concurrency"))
    shared, own, answer = model["workloads"][workload]
    prompt = f"{shared} shared + {own}" if shared else f"{own}"
    print(f"\n### {workload}: prompts of {prompt} tokens, answers of {answer}")
    for key, (title, digits) in MEASURES.items():
        print(f"\n{title}, median (lowest-highest):\n")
        rows = [[name, *(spread(good(of, name, count, key), digits) for count in counts)] for name in systems]
        print_table(["system", *(f"{count} at once" for count in counts)], rows)
    groups = {name: [name] for name in systems if not SYSTEMS[name].is_ours}
    vllm = [name for name in groups if name.startswith("vllm")]
    groups |= {"best of vllm": vllm} if len(vllm) > 1 else {}
    ours = [name for name in systems if SYSTEMS[name].is_ours]
    for title, key in (("tokens/s over", SPEED), ("TTFT p50, how many times shorter than", FIRST)):
        rows = [
            [f"{name} / {group}", *(spread(ratios(of, name, others, count, key), 2) for count in counts)]
            for name in ours
            for group, others in groups.items()
        ]
        if rows:
            print(f"\n{title}, per repeat:\n")
            print_table(["", *(f"{count} at once" for count in counts)], rows)


def good(of: Runs, system: str, concurrency: int, key: str) -> list[float]:
    """Values of one measure, of all runs in which no request failed."""
    return [run[key] for run in of.get((system, concurrency), []) if not run["failed"]]


def ratios(of: Runs, system: str, others: Sequence[str], concurrency: int, key: str) -> list[float]:
    """Lead of a system over the best of the others, by repeat that all finished.

    For speeds it is the quotient, for times its inverse.
    """
    found = []
    for number, run in enumerate(of.get((system, concurrency), [])):
        rivals = [of.get((other, concurrency), [])[number : number + 1] for other in others]
        if run["failed"] or not all(rivals) or any(one[0]["failed"] for one in rivals):
            continue
        values = [one[0][key] for one in rivals]
        found.append(run[key] / max(values) if key == SPEED else min(values) / run[key])
    return found


def plot(directory: Path, page: Page) -> None:
    """Plot bars of throughput and time to first token by concurrency.

    There is a picture per model and workload.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    for model in page["models"]:
        for workload in dict.fromkeys(cell["workload"] for cell in model["cells"]):
            cells = [cell for cell in model["cells"] if cell["workload"] == workload]
            figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4))
            bars(left, cells, SPEED, "output tokens/s")
            bars(right, cells, FIRST, "TTFT p50, ms")
            right.set_yscale("log")
            left.legend(fontsize=8)
            figure.suptitle(f"{model['model']}, {model['dtype']}, {workload}")
            path = directory / f"{model['model']}-{model['dtype']}-{workload}.svg"
            figure.savefig(path, bbox_inches="tight")
            pyplot.close(figure)


def bars(axes: Any, cells: Sequence[dict[str, Any]], measure: str, label: str) -> None:
    """Draw medians as bars, with the lowest and the highest as whiskers."""
    of: Runs = {(cell["system"], cell["concurrency"]): cell["runs"] for cell in cells}
    systems, counts = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("system", "concurrency"))
    width = 0.8 / len(systems)
    for place, system in enumerate(systems):
        at, middle, below, above = [], [], [], []
        for number, count in enumerate(counts):
            if found := good(of, system, count, measure):
                at.append(number + (place + 0.5) * width)
                middle.append(statistics.median(found))
                below.append(middle[-1] - min(found))
                above.append(max(found) - middle[-1])
        axes.bar(at, middle, width, label=system, yerr=[below, above], capsize=2)
    axes.set_xticks([number + 0.4 for number in range(len(counts))], [f"{count} at once" for count in counts])
    axes.set_ylabel(label)
