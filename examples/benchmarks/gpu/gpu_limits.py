"""Deaths, long contexts and memory on a GPU in nine minutes.

    python3 -m examples.benchmarks.gpu.gpu_limits
    python3 -m examples.benchmarks.gpu.gpu_limits --device cpu --tiny       # tries the script itself

As :mod:`examples.benchmarks.gpu.gpu_first`: no network, each part a process with a time limit, results
written as they come. Parts: instances that are killed in bfloat16, with experts spread and without; a
context of 128k tokens; the device's memory by torch, by its driver and by ``nvidia-smi``; the tests of W8A8
and those marked ``gpu``; two instances on one device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # so that it runs from any directory

from examples.benchmarks.gpu.gpu_first import Parts, Result, facts, measured, tests, two_instances

MOST_SECONDS = 560.0
"""Ten seconds of 570 are left for ends of processes."""
STEPS, DEATHS = "examples.benchmarks.gpu.model_steps", "examples.benchmarks.gpu.death_pauses"
LONG = 131_072
"""Tokens of the long context."""
PARTS = ("deaths", "context", "tests", "mesh")


def table(results: Result) -> str:
    """What each part showed, in a few lines."""
    lines = []
    for name, result in results.items():
        if "streams" in result:
            victims = [each for each in result["streams"] if each["rank"] == result["victim"]]
            pauses = ", ".join(f"{each['pause_ms']:.0f}" for each in victims)
            others = sum(each["first_other_token"] is not None for each in result["streams"])
            ended = result["process_ended_ms"]
            lines.append(f"{name}: process gone after {ended or 0:.0f} ms, its streams paused {pauses} ms")
            lines.append(f"  {others} of {len(result['streams'])} answers differ from the undisturbed run")
        for prompt in result.get("prompts", []):
            if "ms" in prompt:
                text = f"{prompt['tokens']:7} tokens: {prompt['ms']:10.1f} ms, a step behind them"
                lines.append(f"{name}: {text} {prompt['step_ms']:.2f} ms")
        for phase, memory in result.get("memory", {}).items():
            if memory:
                sizes = {kind: sum(each) if isinstance(each, list) else each for kind, each in memory.items()}
                text = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in sizes.items())
                lines.append(f"{name}: GiB after {phase}: {text}")
        if "failed" in result or "skipped" in result or result.get("status", 0) != 0:
            why = result.get("failed") or result.get("skipped") or result["status"]
            lines.append(f"{name}: {why} {' '.join(result.get('last_lines', [])[-1:])[:80]}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-json", type=Path, default=Path("build/gpu-limits/results.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS)
    parser.add_argument("--without", nargs="*", choices=PARTS, default=[], help="parts to leave out")
    options = parser.parse_args(argv)
    output = options.output_json.resolve()
    directory = output.parent
    directory.mkdir(parents=True, exist_ok=True)
    parts = Parts(output, min(options.seconds, MOST_SECONDS))
    parts.run("environment", 30.0, facts)
    if options.device == "cuda" and not parts.results["environment"]["devices"]:
        parser.error("there is no device; --device cpu --tiny tries the script itself")
    device = ["--device", options.device]
    if "deaths" not in options.without:
        few = ["--tokens", "300", "--streams", "3"] if options.tiny else []
        plain = "--no-enable-expert-parallel"
        for name, flags in (
            ("killed, experts spread", ["-ep"]),
            ("killed", [plain]),
            ("killed, batch-invariant", [plain, "--batch-invariant"]),
        ):
            arguments = [*device, *few, "--instances", "2", *(f"--flags={each}" for each in flags)]
            if options.tiny and len(flags) > 1:
                continue
            parts.run(name, 80.0, measured(DEATHS, arguments, directory, name))
    if "context" not in options.without:
        longest = 3000 if options.tiny else LONG
        lengths = ["--rows", "--prompts", str(longest // 32), str(longest)]
        size = [*device, *(["--tiny"] * options.tiny), *lengths]
        for shape in ("qwen3-0.6b",) if options.tiny else ("qwen3-0.6b", "qwen3-30b-a3b"):
            arguments = ["--shape", shape, *size, "--seconds", "40"]
            name = f"context {shape}"
            parts.run(name, 80.0, measured(STEPS, arguments, directory, name))
    if "tests" not in options.without:
        coded = ["-k", "w8a8", "tests/engine/gpu/test_coded_layers.py"]
        parts.run("W8A8 tests", 60.0, tests(coded, directory, "w8a8-tests"))
        parts.run("gpu tests", 90.0, tests(["-m", "gpu", "tests/engine/compute"], directory, "gpu-tests"))
    if "mesh" not in options.without:
        parts.run("two instances", 60.0, two_instances(directory))
    print(table(parts.results))
    print(f"\nall numbers: {output}")
    failed = [name for name, each in parts.results.items() if "failed" in each or each.get("status", 0) != 0]
    print(f"failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
