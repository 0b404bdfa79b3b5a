"""Tables and plots of what ``bench_prompts.py`` measured, in whole or in part.

The input is its page: what its JSON holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.benchmarks.bench_lockstep import print_table, spread
from examples.benchmarks.peer_systems import SYSTEMS
from examples.benchmarks.peer_tables import Runs, good, ratios

Page = dict[str, Any]
Cell = dict[str, Any]

FIRST, MOST = "ttft_ms", "ttft_most_ms"
AT_ONCE = {FIRST: "TTFT, median of those at once, ms", MOST: "TTFT of the last, ms"}
BESIDE = {
    FIRST: "its TTFT, ms",
    "itl_ms": "ITL p50, ms",
    "itl_p99_ms": "ITL p99, ms",
    "itl_most_ms": "longest gap, ms",
}


def print_model(model: Page) -> None:
    """Print all tables of one model."""
    calibration = " and ".join(
        f"{one['read_gb_per_s']} GB/s, {one['bf16_gflop_per_s']} GFLOP/s" for one in model["calibration"]
    )
    print(f"\n## {model['model']}, {model['dtype']}\n\nThe machine before and after: {calibration}.")
    print(f"Seconds to start: {model['start_seconds']}")
    for name, why in model["left_out"].items():
        print(f"Left out: {name} {why.splitlines()[0]}")
    for count in dict.fromkeys(cell["count"] for cell in model["cells"] if not cell["beside"]):
        cells = [cell for cell in model["cells"] if cell["count"] == count and not cell["beside"]]
        print(f"\n### {count} at once")
        print_cells(cells, AT_ONCE if count > 1 else {FIRST: "TTFT, ms"})
    if cells := [cell for cell in model["cells"] if cell["beside"]]:
        print(f"\n### One beside {cells[0]['beside']} decodes")
        print_cells(cells, BESIDE)


def print_cells(cells: Sequence[Cell], measures: dict[str, str]) -> None:
    """Print measures by system and length, and how many times shorter ours are."""
    of: Runs = {(cell["system"], cell["length"]): cell["runs"] for cell in cells}
    systems, lengths = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("system", "length"))
    head = [f"{length:,} tokens" for length in lengths]

    def rows(names: Sequence[str], values: Callable[[str, int], list[float]], digits: int) -> list[list[str]]:
        return [[name, *(spread(values(name, length), digits) for length in lengths)] for name in names]

    for key, title in measures.items():
        print(f"\n{title}, median (lowest-highest):\n")
        print_table(
            ["system", *head], rows(systems, lambda name, length, key=key: good(of, name, length, key), 1)
        )
    ours, *_ = [name for name in systems if SYSTEMS[name].is_ours] or [""]
    rivals = groups(systems, ours) if ours else {}
    for key, title in measures.items() if rivals else ():
        print(f"\n{title.removesuffix(', ms')}: how many times shorter {ours} has it than, per repeat:\n")
        shorter = rows(
            list(rivals), lambda name, length, key=key: ratios(of, ours, rivals[name], length, key), 2
        )
        print_table(["", *head], shorter)


def groups(systems: Sequence[str], ours: str) -> dict[str, list[str]]:
    """Names of what ours is compared with: each other system, and the best of vLLM's."""
    found = {name: [name] for name in systems if name != ours}
    vllm = [name for name in found if name.startswith("vllm")]
    return found | ({"best of vllm": vllm} if len(vllm) > 1 else {})


def plot(directory: Path, page: Page) -> None:
    """Plot times to first token by length, with a panel for each number at once.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    for model in page["models"]:
        plain = [cell for cell in model["cells"] if not cell["beside"] and good_of(cell)]
        if not plain:
            continue
        counts = list(dict.fromkeys(cell["count"] for cell in plain))
        figure, axes = pyplot.subplots(1, len(counts), figsize=(6 * len(counts), 4), squeeze=False)
        for panel, count in zip(axes[0], counts, strict=True):
            lines(panel, [cell for cell in plain if cell["count"] == count])
            panel.set_title(f"{count} at once")
        axes[0][0].set_ylabel("TTFT, ms")
        axes[0][0].legend(fontsize=8)
        figure.suptitle(f"{model['model']}, {model['dtype']}")
        figure.savefig(directory / f"prompts-{model['model']}-{model['dtype']}.svg", bbox_inches="tight")
        pyplot.close(figure)


def good_of(cell: Cell) -> list[float]:
    """Times to first token of the runs in which no request failed."""
    return [run[FIRST] for run in cell["runs"] if not run["failed"]]


def lines(axes: Any, cells: Sequence[Cell]) -> None:
    """Draw medians as lines, with the lowest and the highest as a band."""
    for system in dict.fromkeys(cell["system"] for cell in cells):
        found = [(cell["length"], good_of(cell)) for cell in cells if cell["system"] == system]
        at = [length for length, _ in found]
        axes.plot(at, [statistics.median(values) for _, values in found], marker="o", label=system)
        axes.fill_between(at, [min(v) for _, v in found], [max(v) for _, v in found], alpha=0.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens of each prompt")
    axes.grid(visible=True, alpha=0.3)
