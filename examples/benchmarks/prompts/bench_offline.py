#!/usr/bin/env python3
r"""Benchmark of many prompts through the class ``LLM``, ours and vLLM's, in turn.

    examples/benchmarks/install_peers.sh  # once
    python examples/benchmarks/prompts/bench_offline.py                              # dense-small
    python examples/benchmarks/prompts/bench_offline.py --models dense-0.5b --prompts 64
    python examples/benchmarks/prompts/bench_offline.py --arguments '{"max_num_batched_tokens": 2048}'
    python examples/benchmarks/prompts/bench_offline.py --show build/bench-offline.json

All systems load the model first, each in a process of its own, and stay. Then each gets the same prompts of
random tokens in turn, again and again. Printed are output tokens per second, medians over the repeats with
the lowest and the highest, and the quotients within each repeat. Time is that of ``generate``.

    lockstep       LLM(MODEL)
    lockstep-dp2   LLM(MODEL, data_parallel_size=2): an instance for each core
    vllm           vLLM's LLM(MODEL): compiled, a core left free, as is its default
    vllm-cores     the same on all cores
    vllm-eager     LLM(MODEL, enforce_eager=True)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.bench_lockstep import print_table, spread
from examples.benchmarks.bench_peers import come_to_rest, find, leave_out, tell
from examples.benchmarks.machine_limits import calibrate
from examples.benchmarks.peer_systems import (
    CORES,
    KV,
    PEERS,
    START_SECONDS,
    NotReady,
    Room,
    System,
    ended,
    environment_of,
)
from examples.benchmarks.peer_tables import SPEED, Runs, good, ratios
from examples.benchmarks.prompts.prompt_load import Prompt, prompts_of
from examples.benchmarks.prompts.prompt_tables import groups
from router.tools.bench.report import machine

Args = argparse.Namespace
Page = dict[str, Any]

ENGINE = Path(__file__).with_name("offline_engine.py")
BOTH_CORES = KV | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}"}
SYSTEMS = {
    "lockstep": System("lockstep"),
    "lockstep-dp2": System("lockstep"),
    "vllm": System("vllm", KV, peer="vllm"),
    "vllm-cores": System("vllm", BOTH_CORES, peer="vllm"),
    "vllm-eager": System("vllm", KV, peer="vllm"),
}
"""Systems by name; the command is the module that has the class."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "lockstep-dp2": {"data_parallel_size": 2},
    "vllm-eager": {"enforce_eager": True},
}
DEFAULT = ["lockstep", "vllm", "vllm-cores", "vllm-eager"]
RUN_SECONDS = 900.0
"""Longest wait for all answers of a run."""


class Engine:
    """A process with a model."""

    def __init__(self, child: subprocess.Popen[bytes], log: IO[str]) -> None:
        self._child = child
        self._log = log

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer.

        Raises:
            NotReady: it ended, or gave none in time.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()
        is_there, _, _ = select.select([self._child.stdout], [], [], seconds)
        line = self._child.stdout.readline() if is_there else b""
        if not line:
            self._log.seek(0)
            raise NotReady(f"gave no answer; its log ends with\n{self._log.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def engine(name: str, room: Room) -> Iterator[Engine]:
    """The process of a system; ended with the block, and its children with it."""
    system = SYSTEMS[name]
    python = str(PEERS / system.peer / "bin" / "python") if system.peer else sys.executable
    with tempfile.NamedTemporaryFile("w+", prefix=f"bench-{name}-", suffix=".log", errors="replace") as log:
        tell(f"starting {name} (log: {log.name})")
        child = subprocess.Popen(
            [python, "-P", str(ENGINE), system.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment_of(system, room),
            start_new_session=True,
        )
        with ended(child):
            yield Engine(child, log)


def arguments_of(name: str, model: Path, args: Args) -> dict[str, Any]:
    """Arguments of the class of a system."""
    given = {"model": str(model), "dtype": args.dtype, "max_model_len": args.context}
    if not SYSTEMS[name].is_ours:
        return given | ARGUMENTS.get(name, {})
    return given | {"kv_cache_memory_bytes": f"{args.kv_gib}G"} | ARGUMENTS.get(name, {}) | args.arguments


def drawn(args: Args, number: int, vocabulary: int) -> list[Prompt]:
    """Prompts of a repeat, of random lengths."""
    rng = random.Random(f"{args.seed} lengths {number}")
    lengths = [rng.randint(*args.lengths) for _ in range(args.prompts)]
    return prompts_of(f"{args.seed} offline {number}", vocabulary, lengths)


def bench_model(name: str, args: Args, page: Page, save: Callable[[], None]) -> None:
    """All systems on one model; ``page`` is filled, and saved after each run."""
    model = find(name)
    page |= {"model": model.name, "dtype": args.dtype, "calibration": [calibrate()], "start_seconds": {}}
    page |= {"left_out": {}, "runs": {}}
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    warmth = {"prompts": drawn(args, -1, vocabulary)[: args.warm], "answer": 16}
    with contextlib.ExitStack() as stack:
        engines = {}
        for system in args.systems:
            if SYSTEMS[system].peer and not (PEERS / SYSTEMS[system].peer).exists():
                leave_out(page, system, "is not installed (examples/benchmarks/install_peers.sh)")
                continue
            one = stack.enter_context(engine(system, Room(args.context, args.kv_gib)))
            began = time.monotonic()
            try:
                one.ask(arguments_of(system, model, args), START_SECONDS)
                page["start_seconds"][system] = round(time.monotonic() - began, 1)
                one.ask(warmth, RUN_SECONDS)
            except NotReady as error:
                leave_out(page, system, str(error))
                continue
            engines[system] = one
            page["runs"][system] = []
        for number in range(args.repeats):
            asked = {"prompts": drawn(args, number, vocabulary), "answer": args.answer}
            for system, one in engines.items():
                come_to_rest()
                answer = one.ask(asked, RUN_SECONDS)
                failed = args.prompts * args.answer - answer["tokens"]
                speed = answer["tokens"] / answer["seconds"]
                page["runs"][system].append({SPEED: round(speed, 1), "failed": failed})
                save()
                tell(f"{name} {number + 1}: {system}: {speed:.0f} tok/s ({answer['seconds']:.1f} s)")
    page["calibration"].append(calibrate())
    save()


def print_model(model: Page) -> None:
    """Print the tables of one model."""
    calibration = " and ".join(
        f"{one['read_gb_per_s']} GB/s, {one['bf16_gflop_per_s']} GFLOP/s" for one in model["calibration"]
    )
    print(f"\n## {model['model']}, {model['dtype']}\n\nThe machine before and after: {calibration}.")
    for name, why in model["left_out"].items():
        print(f"Left out: {name} {why.splitlines()[0]}")
    of: Runs = {(system, 1): runs for system, runs in model["runs"].items()}
    rows = [[system, spread(good(of, system, 1, SPEED))] for system in model["runs"]]
    print("\nOutput tokens/s, median (lowest-highest):\n")
    print_table(["system", "tokens/s"], rows)
    ours = [system for system in model["runs"] if SYSTEMS[system].is_ours]
    shown = [
        [f"{name} / {group}", spread(ratios(of, name, others, 1, SPEED), 2)]
        for name in ours
        for group, others in groups(list(model["runs"]), name).items()
    ]
    if shown:
        print("\nHow many times faster, per repeat:\n")
        print_table(["", "times"], shown)


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--models", nargs="+", default=["dense-small"], help="names or directories (default: %(default)s)")
    add("--systems", nargs="+", choices=[*SYSTEMS], default=DEFAULT, help="(default: %(default)s)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default: %(default)s)")
    add("--prompts", type=int, default=256, help="number of them (default: %(default)s)")
    add(
        "--lengths", type=int, nargs=2, default=[64, 256], metavar=("LEAST", "MOST"), help="(default: 64 256)"
    )
    add("--answer", type=int, default=128, help="tokens of each answer (default: %(default)s)")
    add("--context", type=int, default=2048, help="tokens (default: %(default)s)")
    add("--kv-gib", type=int, default=2, help="of each system's KV cache (default: %(default)s)")
    add("--arguments", type=json.loads, default={}, help="further ones of our class, as a JSON object")
    add("--warm", type=int, default=32, help="prompts before, which do not count (default: %(default)s)")
    add("--repeats", type=int, default=3, help="interleaved (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--output-json", type=Path, metavar="FILE", help="write all numbers into this file, after each run")
    add("--show", type=Path, metavar="FILE", help="measure nothing: the tables of such a file")
    args = parser.parse_args()
    if min(args.prompts, args.answer, args.repeats, args.kv_gib, *args.lengths) < 1:
        parser.error("a count is too small")
    if args.lengths[0] > args.lengths[1] or args.lengths[1] + args.answer > args.context:
        parser.error("--lengths are LEAST and MOST, which fit the context with the answer")
    return args


def main() -> int:
    args = parse_args()
    if args.show is not None:
        for model in json.loads(args.show.read_text())["models"]:
            print_model(model)
        return 0
    page: Page = {"command": shlex.join(["python", *sys.argv]), "machine": machine(), "models": []}

    def save() -> None:
        if args.output_json is not None:
            args.output_json.parent.mkdir(parents=True, exist_ok=True)
            args.output_json.write_text(json.dumps(page, indent=1) + "\n")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended
    try:
        for name in args.models:
            page["models"].append({})
            bench_model(name, args, page["models"][-1], save)
    finally:
        for model in page["models"]:
            if model.get("runs"):
                print_model(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
