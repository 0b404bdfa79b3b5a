"""Bits on a GPU in nine minutes: operators, whole models, and the price.

    python3 -m examples.benchmarks.gpu.gpu_bits
    python3 -m examples.benchmarks.gpu.gpu_bits --device cpu --tiny       # tries the script itself

As :mod:`examples.benchmarks.gpu.gpu_first`: no network, each part a process with a time limit, results
written as they come. Parts: the matrix of operators, the invariance table's device column, and steps of a
model with and without ``--batch-invariant`` on the same device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # so that it runs from any directory

from examples.benchmarks.gpu.gpu_first import Parts, Result, facts, measured, tests

MOST_SECONDS = 560.0
"""Ten seconds of 570 are left for ends of processes."""
TABLE = "tests/engine/invariance/test_device.py"
STEPS = "examples.benchmarks.gpu.model_steps"


def table(results: Result) -> str:
    """What differs in each mode, and what a step costs."""
    lines = []
    for mode in ("default", "batch-invariant"):
        found = results.get("operators", {}).get(mode)
        if found is not None:
            lines.append(f"{mode}: {'all equal' if not found['differ'] else ', '.join(found['differ'])}")
            lines.append(f"  first that differs: {found['first']}")
    plain, fixed = (
        {
            (row["rows"], row["sampling"]): row["step_ms"]
            for row in results.get(name, {}).get("rows", [])
            if "step_ms" in row
        }
        for name in ("steps", "steps batch-invariant")
    )
    for (rows, sampling), ms in plain.items():
        if (rows, sampling) in fixed:
            other = fixed[rows, sampling]
            price = f"{ms:9.2f} ms, {other:9.2f} batch-invariant ({other / ms - 1:+.0%})"
            lines.append(f"{rows:4} rows, {sampling:16} {price}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-json", type=Path, default=Path("build/gpu-bits/results.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS)
    parser.add_argument("--without", nargs="*", default=[], help="parts to leave out: tests, steps")
    options = parser.parse_args(argv)
    output = options.output_json.resolve()
    directory = output.parent
    directory.mkdir(parents=True, exist_ok=True)
    parts = Parts(output, min(options.seconds, MOST_SECONDS))
    parts.run("environment", 30.0, facts)
    if options.device == "cuda" and not parts.results["environment"]["devices"]:
        parser.error("there is no device; --device cpu --tiny tries the script itself")
    size = ["--device", options.device, *(["--tiny"] * options.tiny)]
    matrix = [*size, "--seconds", "200"]
    parts.run("operators", 220.0, measured("examples.benchmarks.gpu.bits_matrix", matrix, directory, "bits"))
    if "steps" not in options.without:
        rows = ["--rows", "1", "4"] if options.tiny else ["--rows", "1", "32", "256"]
        short = ["--context", "40", "--steps", "3"] if options.tiny else []
        for name, flags in (("steps", []), ("steps batch-invariant", ["--batch-invariant"])):
            arguments = ["--shape", "qwen3-0.6b", *size, *rows, *short, "--seconds", "75", *flags]
            parts.run(name, 100.0, measured(STEPS, arguments, directory, name))
    if "tests" not in options.without:
        marked = ["-m", "gpu"] if options.device == "cuda" else []
        parts.run("device column", 120.0, tests([*marked, TABLE], directory, "device-column"))
    print(table(parts.results))
    print(f"\nall numbers: {output}")
    failed = [name for name, each in parts.results.items() if "failed" in each or each.get("status", 0) != 0]
    print(f"failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
