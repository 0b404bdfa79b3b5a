"""Speed on a GPU in nine minutes: kernels, steps, prompts, a peer.

    python3 -m examples.benchmarks.gpu.gpu_first
    python3 -m examples.benchmarks.gpu.gpu_first --before ../older        # beside another checkout
    python3 -m examples.benchmarks.gpu.gpu_first --device cpu --tiny      # tries the script itself

Needs torch, transformers, triton, pytest and what Lockstep needs; no network. Each part is a process with a
time limit of its own, all together less than 570 s, so that one that hangs or crashes costs only itself.
Results are written after each part. Without a GPU nothing here says anything about one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.gpu.whole_files import write_whole
from parallel.devices import cuda_devices
from router.tools.doctor.gpu import read_triton

ROOT = Path(__file__).parents[3]
MOST_SECONDS = 560.0
"""Ten seconds of 570 are left for ends of processes."""
TEST_PROCESSES = min(8, (os.cpu_count() or 1) // 2)
SUMMARY = re.compile(r"\d+ (passed|failed|skipped|error|deselected)")
"""What the last line of tests has; after it libraries may print more."""
LINE = 300
"""Letters of a line of a log that are kept."""
PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec", "pyzmq")
Result = dict[str, Any]


class Parts:
    """Runs the parts one after the other, each within what is left of the time."""

    def __init__(self, output: Path, seconds: float) -> None:
        self.results: Result = {}
        self._output = output
        self._deadline = time.monotonic() + seconds

    def left(self, most: float) -> float:
        return max(0.0, min(most, self._deadline - time.monotonic()))

    def run(self, name: str, most: float, part: Callable[[float], Result]) -> None:
        """Run a part for at most so many seconds; what it raises is its result."""
        began = time.monotonic()
        seconds = self.left(most)
        if seconds < 5.0:
            result: Result = {"skipped": "no time is left"}
        else:
            try:
                result = part(seconds)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                result = {"failed": f"{type(error).__name__}: {error}"}
        self.results[name] = result | {"wall_s": round(time.monotonic() - began, 1)}
        write_whole(self._output, json.dumps(self.results, indent=2))


def environment(root: Path = ROOT) -> Mapping[str, str]:
    """For the parts: no interpreter, nothing from the network; packages may come by ``PYTHONPATH``."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    others = [path for path in (str(Path(each).resolve()) for each in given) if path != str(ROOT)]
    paths = os.pathsep.join([str(root), *others])
    changed = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {name: each for name, each in os.environ.items() if name != "TRITON_INTERPRET"} | changed


def call(command: list[str], seconds: float, log: Path, root: Path = ROOT) -> Result:
    """Run a command in a process group of its own; its end, and last lines."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment(root),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"ended after {seconds:.0f} s"
    lines = [line[:LINE] for line in log.read_text(errors="replace").splitlines()]
    summary = [line for line in lines if SUMMARY.search(line)]
    return {"status": status, "last_lines": [*lines[-6:], *summary[-1:]], "log": str(log)}


def facts(_: float) -> Result:
    """What this machine is."""
    found: Result = {"python": platform.python_version(), "machine": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["devices"] = list(cuda_devices())
    found["triton_needs"] = repr(read_triton(os.environ))
    for tool in ("nvidia-smi", "rocm-smi"):
        if shutil.which(tool):
            done = subprocess.run([tool], capture_output=True, text=True, timeout=20, check=False)
            found[tool] = done.stdout.splitlines()[:20]
    return found


def tests(paths: list[str], directory: Path, name: str) -> Callable[[float], Result]:
    """Tests of these paths; warnings are no errors, since versions differ here."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", *paths]
    if TEST_PROCESSES > 1 and importlib.util.find_spec("xdist"):  # most of their time is the compiler's
        command += ["--numprocesses", str(TEST_PROCESSES), "--dist", "worksteal"]
    return lambda seconds: call(command, seconds, directory / f"{name}.log")


def measured(
    module: str, arguments: list[str], directory: Path, name: str, root: Path = ROOT
) -> Callable[[float], Result]:
    """A module of the checkout ``root``, whose numbers count even if it fails."""
    stem = name.replace(",", "").replace(" ", "-")
    output = directory / f"{stem}.json"

    def part(seconds: float) -> Result:
        output.unlink(missing_ok=True)
        command = [sys.executable, "-m", module, *arguments, "--output", str(output)]
        result = call(command, seconds, directory / f"{stem}.log", root)
        return result | (json.loads(output.read_text()) if output.exists() else {})

    return part


def two_instances(directory: Path) -> Callable[[float], Result]:
    """``serve -dp 2`` of the shipped model, whose instances may share a device."""
    log = directory / "serve.log"

    def part(seconds: float) -> Result:
        command = [
            sys.executable, "-c", "import sys; from router.launcher.entry import serve; sys.exit(serve())",
            "-dp", "2", "--port", "26000", "-dpp", "26010",
        ]  # fmt: skip
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                answer = _ask(process, time.monotonic() + seconds - 5.0)
            finally:
                with suppress(ProcessLookupError):  # it may have ended by itself
                    os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(5.0)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        told = ("attention:", "CUDA graphs:", "KV blocks", "experts:", "share", "out of memory")
        lines = [
            line
            for line in log.read_text(errors="replace").splitlines()
            if any(each in line for each in told)
        ]
        return {"answer": answer, "lines": lines[:20], "log": str(log)}

    return part


def _ask(process: subprocess.Popen[bytes], deadline: float) -> str:
    """The text of a short completion, once the mesh answers."""
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    body = json.dumps({"model": "lockstep-moe", "prompt": "Once upon", "max_tokens": 16, "temperature": 0})
    request = Request(
        "http://127.0.0.1:26000/v1/completions", body.encode(), {"content-type": "application/json"}
    )
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(request, timeout=10.0) as response:
                return str(json.loads(response.read())["choices"][0]["text"])
        except (URLError, OSError):
            time.sleep(0.5)
    raise ValueError("the mesh did not answer in time; see the log")


def table(results: Result) -> str:
    """One line for each part, and one for each number of requests of each model."""
    lines = ["part                 seconds  result"]
    for name, result in results.items():
        said = (
            result.get("failed") or result.get("skipped") or result.get("answer") or result.get("status", "")
        )
        last = " ".join(result.get("last_lines", [])[-1:])[:60] if "rows" not in result else ""
        if "layers" in result:
            last = f"{result.get('device', 'CPU')}, {result['layers']} layers, {result['attention']}"
        lines.append(f"{name:20} {result['wall_s']:7.1f}  {said!s:.40} {last}".rstrip())
    lines += ["", "model            rows  sampling         step ms   tokens/s   of the limit   transformers"]
    for name, result in results.items():
        peers = {row["rows"]: row for row in results.get(f"{name} peer", {}).get("rows", [])}
        for row in result.get("rows", []) if "weight_bytes" in result else []:
            if "step_ms" not in row:
                continue
            peer = (
                peers.get(row["rows"], {}).get("decode_tokens_per_s") if row["sampling"] == "greedy" else None
            )
            lines.append(
                f"{name:15} {row['rows']:5}  {row['sampling']:15} {row['step_ms']:8.2f}"
                f" {row['tokens_per_s']:10.0f}"
                f"   {row['tokens_per_s'] / row['limit_tokens_per_s']:11.1%}"
                f"   {'' if peer is None else f'{peer:12.0f}'}".rstrip()
            )
    for name, result in results.items():
        for row in result.get("prompts", []):
            if "ms" in row:
                lines.append(f"{name:25} {row['tokens']:6} tokens {row['ms']:9.2f} ms")
    products = [row for each in results.values() for row in each.get("products", [])]
    if products:
        lines += ["", "quantised weights   rows         ms   reading ms   differs by"]
        lines += [
            f"{row['kind']:18} {row['rows']:5} {row['ms']:10.3f} {row['limit_ms']:12.3f}"
            f"   {row['difference']:10.1e}"
            for row in products
        ]
    return "\n".join(lines)


def run_measures(parts: Parts, options: argparse.Namespace, directory: Path) -> None:
    """Models, products and the peer: the present checkout, and beside it the one before."""
    size = ["--device", options.device, *(["--tiny"] * options.tiny)]
    rows = ["--rows", "1", "4"] if options.tiny else ["--rows", "1", "32", "256"]
    short = ["--context", "40", "--steps", "3"] if options.tiny else []
    lengths = ["40", "100"] if options.tiny else ["64", "512", "4096", "32768"]
    profile = ["--profile", str(directory)]
    steps, peer = "examples.benchmarks.gpu.model_steps", "examples.benchmarks.gpu.peer_steps"
    codes = "examples.benchmarks.gpu.coded_steps"
    model = ["--shape", "qwen3-0.6b", *size, "--rows", "--seconds", "35", "--prompts", *lengths]
    larger = ["--shape", "qwen3-30b-a3b", *size, *rows, *short, *profile, "--seconds", "65"]
    smaller = ["--shape", "qwen3-0.6b", *size, *rows, *short, *profile, "--seconds", "55"]
    for name, seconds, module, arguments in (
        ("qwen3-0.6b", 80.0, steps, smaller),
        ("prompts", 60.0, steps, model),
        ("prompts without graphs", 60.0, steps, [*model, "--enforce-eager"]),
        ("quantised products", 40.0, codes, [*size, *rows]),
        ("qwen3-30b-a3b", 90.0, steps, larger),
    ):
        if name in options.without:
            continue
        parts.run(name, seconds, measured(module, arguments, directory, name))
        if options.before is not None:
            older, root = f"{name} before", options.before.resolve()
            parts.run(older, seconds, measured(module, arguments, directory, older, root))
    if "mesh" not in options.without:
        parts.run("two instances", 60.0, two_instances(directory))
    if "peer" not in options.without:  # the last one, since it may take all that is left
        arguments = ["--shape", "qwen3-0.6b", *size, *rows, *short[:2], *(["--tokens", "6"] * options.tiny)]
        parts.run("qwen3-0.6b peer", 80.0, measured(peer, arguments, directory, "qwen3-0.6b peer"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-json", type=Path, default=Path("build/gpu-first/results.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS)
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout to measure in turn")
    parser.add_argument("--without", nargs="*", default=[], help="parts to leave out, by name")
    options = parser.parse_args(argv)
    output = options.output_json.resolve()
    directory = output.parent
    directory.mkdir(parents=True, exist_ok=True)
    parts = Parts(output, min(options.seconds, MOST_SECONDS))
    parts.run("environment", 40.0, facts)
    if options.device == "cuda" and not parts.results["environment"]["devices"]:
        parser.error("there is no device; --device cpu --tiny tries the script itself")
    if "tests" not in options.without:
        kernels = ["tests/engine/attention/test_triton_attention.py", "tests/engine/gpu"]
        parts.run("triton tests", 90.0, tests(kernels, directory, "triton-tests"))
    run_measures(parts, options, directory)
    print(table(parts.results))
    print(f"\nall numbers: {output}")
    failed = [name for name, each in parts.results.items() if "failed" in each or each.get("status", 0) != 0]
    print(f"failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
