"""Results of a run, under the names and in the layout of ``vllm bench serve``.

Pure, but for printing.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Result = dict[str, Any]

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
REPORT = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "Maximum request concurrency:": "max_concurrency",
    "Request rate configured (RPS):": "request_rate",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Request goodput (req/s):": "request_goodput",
    "Output token throughput (tok/s):": "output_throughput",
    "Total Token throughput (tok/s):": "total_token_throughput",
}
COLUMNS = {
    "concurrency": "max_concurrency",
    "failed": "failed",
    "output tok/s": "output_throughput",
    "req/s": "request_throughput",
    **{f"{name.upper()} {p}": f"{p}_{name}_ms" for name in METRICS for p in ("p50", "p99")},
}
"""Columns of the table of a series: title, and key of the result."""
DETAILS = ("input_len", "output_len", "ttft", "itl", "error")
"""What --save-result writes for every request, as input_lens and so on; --output-json does not."""


@dataclass
class RequestResult:
    """Result of one request; times in seconds."""

    input_len: int
    output_len: int = 0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    error: str = ""
    text: str = ""
    """The answer, for the next turn of a conversation."""

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


def meets(outcome: RequestResult, goals: Mapping[str, float]) -> bool:
    """Whether a request is good: within each goal (milliseconds by ttft, tpot, e2el)."""
    taken = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return not outcome.error and all(1000 * taken[name] <= most for name, most in goals.items())


def summary(
    outcomes: Sequence[RequestResult],
    duration: float,
    *,
    described: Result,
    percentiles: Sequence[float] = (99.0,),
    goals: Mapping[str, float] | None = None,
) -> Result:
    """The result of a run of ``duration`` seconds, under vLLM's keys.

    ``described`` is what was run.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    num_input, num_output = sum(one.input_len for one in good), sum(one.output_len for one in good)
    result: Result = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        **described,
        "num_prompts": len(outcomes),
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(meets(one, goals) for one in outcomes) / duration if goals else None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        **{f"{name}s": [getattr(outcome, name) for outcome in outcomes] for name in DETAILS},
    }
    values = {
        "ttft": [one.ttft for one in good],
        "tpot": [one.tpot for one in good if one.output_len > 1],
        "itl": [gap for one in good for gap in one.itl],
        "e2el": [one.latency for one in good],
    }
    for name, seconds in values.items():
        ms = sorted(1000 * value for value in seconds) or [0.0]
        mean, median, deviation = statistics.fmean(ms), statistics.median(ms), statistics.pstdev(ms)
        result |= {f"mean_{name}_ms": mean, f"median_{name}_ms": median, f"std_{name}_ms": deviation}
        for percent in {50.0, 99.0, *percentiles}:
            result[f"p{percent:g}_{name}_ms"] = percentile(ms, percent)
    return result


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of sorted values, with linear interpolation."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def report(result: Result, metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Report of a run in the layout of ``vllm bench serve``."""
    lines = ["{:=^50}".format(" Serving Benchmark Result ")]
    for label, key in REPORT.items():
        if result[key] not in (None, "inf"):
            lines.append(_line(label, result[key]))
    for name in metrics:
        lines.append(f"{METRICS[name]:-^50}")
        lines.append(_line(f"Mean {name.upper()} (ms):", result[f"mean_{name}_ms"]))
        lines.append(_line(f"Median {name.upper()} (ms):", result[f"median_{name}_ms"]))
        lines += [_line(f"P{p:g} {name.upper()} (ms):", result[f"p{p:g}_{name}_ms"]) for p in percentiles]
    return "\n".join([*lines, "=" * 50])


def _line(label: str, value: float | int) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def table(results: Sequence[Result]) -> str:
    """Markdown table with one row per run."""
    cells = [[result[key] for key in COLUMNS.values()] for result in results]
    rows = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    lines = ["\nLatencies in ms.\n"]
    for row in (list(COLUMNS), ["-" * (width - 1) + ":" for width in widths], *rows):
        lines.append(
            "| " + " | ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) + " |"
        )
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Description of the machine that was measured on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {"cpu": cpu[1] if cpu else "unknown", "cores": os.cpu_count(), "memory_gib": memory}
