#!/usr/bin/env python3
r"""Benchmark of the first tokens of short and long prompts, beside other systems.

    examples/benchmarks/install_peers.sh  # once; what is missing is left out, and listed
    python examples/benchmarks/prompts/bench_prompts.py --quick           # a first look: three minutes
    python examples/benchmarks/prompts/bench_prompts.py                   # dense-small in bfloat16
    python examples/benchmarks/prompts/bench_prompts.py --models dense-0.5b --lengths 500 2000 --beside
    python examples/benchmarks/prompts/bench_prompts.py --before ../main  # another checkout beside this one
    python examples/benchmarks/prompts/bench_prompts.py --serve-flags "--max-num-batched-tokens 2048"
    python examples/benchmarks/prompts/bench_prompts.py --show build/bench-prompts.json --plots build/plots

All systems of a model are started first and stay; those that are not measured sleep. Then each gets the same
prompts in turn, again and again, so that other load on the machine hits all of them.

    at once    so many prompts of a length at the same moment: the median time to first token, and the longest
    beside     one long prompt while eight requests decode: its time to first token, and the gaps between
               the tokens of the eight meanwhile

Printed are medians over the repeats with the lowest and the highest, and how many times sooner Lockstep is
than each other system and than the best of vLLM's settings, per repeat. A cell of more prompt tokens than
``--most-tokens`` is left out. ``--output-json`` is written after each run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

import uvloop

from examples.benchmarks.bench_peers import bench_all, come_to_rest, find, leave_out, tell
from examples.benchmarks.machine_limits import calibrate
from examples.benchmarks.peer_systems import SYSTEMS, NotReady, Room, System, started, until_ready
from examples.benchmarks.prompts import prompt_load as load
from examples.benchmarks.prompts.prompt_tables import plot, print_model
from router.tools.bench.client import BenchTarget

Args = argparse.Namespace
Page = dict[str, Any]
Cell = dict[str, Any]

LENGTHS = [128, 500, 2000, 4000, 8000, 16_000]
QUICK_LENGTHS = [500, 2000, 4000, 8000]
CHOICES = [
    ("lengths", LENGTHS, QUICK_LENGTHS),
    ("counts", [1, 4, 8], [1]),
    ("beside", [16_000], []),
    ("repeats", 3, 2),
]
"""Defaults of arguments, and those with ``--quick``."""
BESIDE = 8
"""Requests that decode beside a long prompt."""
DECODED = 4000
"""Tokens of the KV cache that each of them may come to."""
MARGIN = 64
"""Tokens of the context besides the longest prompt."""
VLLM = ["vllm", "vllm-cores", "vllm-eager"]
DEFAULT = {"dense-small": ["lockstep-dp1", *VLLM, "llama.cpp"]}
QUICK = ["lockstep-dp1", "vllm-cores"]
BEFORE = "before"
"""Name of the system of ``--before``."""


def room_of(model: Path, dtype: str, cells: Sequence[Cell]) -> Room:
    """Room for the largest of the cells."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = config["num_key_value_heads"] * (config.get("head_dim") or config["hidden_size"] // heads)
    token_bytes = 2 * config["num_hidden_layers"] * width * (2 if dtype == "bfloat16" else 4)
    tokens = max(cell["length"] * cell["count"] + cell["beside"] * DECODED for cell in cells)
    longest = max(cell["length"] for cell in cells)
    context = min(config["max_position_embeddings"], max(longest, DECODED) + MARGIN)
    if longest > context - load.ANSWER:
        raise SystemExit(f"{model.name} has a context of {context} tokens, too short for {longest}")
    return Room(context=context, kv_gib=-(-tokens * token_bytes // 2**30))


def cells_of(args: Args, systems: Sequence[str]) -> list[Cell]:
    """The cells of a model in the order in which they are measured."""
    kinds = [(length, count, 0) for count in args.counts for length in args.lengths]
    kinds += [(length, 1, BESIDE) for length in args.beside]
    return [
        {"system": system, "length": length, "count": count, "beside": beside, "runs": []}
        for length, count, beside in kinds
        if length * count <= args.most_tokens
        for system in systems
        if max(count, beside) <= SYSTEMS[system].most
    ]


def measure(cell: Cell, url: str, vocabulary: int, key: str, rounds: int | None = None) -> load.Run:
    """One run of a cell; the same key gives the same prompts."""
    target = BenchTarget(base_url=url, endpoint="/v1/completions", model="bench", ignore_eos=True)
    length, count = cell["length"], cell["count"]
    if cell["beside"]:
        lengths = [length] + [load.DECODE_PROMPT] * cell["beside"]
        prompt, *decodes = load.prompts_of(f"{key} beside {length}", vocabulary, lengths)
        most = DECODED - load.DECODE_PROMPT
        return uvloop.run(load.beside_decodes(target, prompt, decodes, most))
    lengths = [length] * count * (rounds or load.rounds_of(length, count))
    prompts = load.prompts_of(f"{key} {count} {length}", vocabulary, lengths)
    return uvloop.run(load.first_tokens(target, prompts, count))


def warm(url: str, vocabulary: int, longest: int) -> None:
    """Send short and long prompts, so that what is made at first use is there."""
    for number, (length, count) in enumerate([(128, 1), (min(2000, longest), 1), (128, 4)]):
        measure({"length": length, "count": count, "beside": 0}, url, vocabulary, f"warm {number}")


def started_systems(
    stack: contextlib.ExitStack, model: Path, room: Room, wanted: Sequence[str], page: Page
) -> Iterator[tuple[str, str]]:
    """Each system that starts, with its address."""
    for system in wanted:
        if why := SYSTEMS[system].lacks(model):
            leave_out(page, system, why)
            continue
        child, url, log = stack.enter_context(started(system, model, page["dtype"], room))
        try:
            page["start_seconds"][system] = round(until_ready(child, url, log), 1)
        except NotReady as error:
            leave_out(page, system, str(error))
            continue
        yield system, url


def bench_model(name: str, args: Args, page: Page, save: Callable[[], None]) -> None:
    """All systems on one model; ``page`` is filled, and saved after each run."""
    model = find(name)
    wanted = args.systems or DEFAULT.get(model.name, ["lockstep-dp1", *VLLM])
    room = room_of(model, args.dtype, cells_of(args, wanted))
    page |= {"model": model.name, "dtype": args.dtype, "room": vars(room), "calibration": [calibrate()]}
    page |= {"start_seconds": {}, "left_out": {}, "cells": []}
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    with contextlib.ExitStack() as stack:
        urls = dict(started_systems(stack, model, room, [*wanted, *args.more_systems], page))
        page["cells"] = cells_of(args, list(urls))
        for url in urls.values():
            warm(url, vocabulary, max(args.lengths))
        for number in range(args.repeats):
            for cell in page["cells"]:
                come_to_rest()
                run = measure(cell, urls[cell["system"]], vocabulary, f"{args.seed} {number}", args.rounds)
                cell["runs"].append({key: round(run[key], 3) if key != "error" else run[key] for key in run})
                save()
                tell(f"{name} {number + 1}: {described(cell)}: {said(run)}")
    page["calibration"].append(calibrate())
    save()


def described(cell: Cell) -> str:
    beside = f" beside {cell['beside']} decodes" if cell["beside"] else ""
    return f"{cell['count']} x {cell['length']}{beside}: {cell['system']}"


def said(run: load.Run) -> str:
    """A run in a few words."""
    if "ttft_ms" not in run:
        return f"failed: {run['error']}"
    gaps = f", ITL p99 {run['itl_p99_ms']:.0f} ms" if "itl_p99_ms" in run else ""
    return f"TTFT {run['ttft_ms']:.0f} ms{gaps}{' and failed: ' + run['error'] if run['error'] else ''}"


def show(page: Page, plots: Path | None) -> None:
    """Print tables, and save plots if asked for."""
    for model in page["models"]:
        if model.get("cells"):
            print_model(model)
    if plots is not None:
        try:
            plot(plots, page)
        except ImportError:
            tell("no plots: pip install '.[bench]' brings matplotlib")


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--models", nargs="+", default=["dense-small"], help="names or directories (default: %(default)s)")
    add("--systems", nargs="+", choices=[*SYSTEMS], help="(default: those that fit the model)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default: %(default)s)")
    add("--lengths", type=int, nargs="+", help=f"of prompts (default: {LENGTHS}, quick {QUICK_LENGTHS})")
    add("--counts", type=int, nargs="+", help="at once (default: 1 4 8, quick 1)")
    add("--beside", type=int, nargs="*", metavar="LENGTH",
        help="of a prompt beside eight decodes (default: 16000, quick none)")  # fmt: skip
    add("--most-tokens", type=int, default=32_000, help="of prompts in a cell (default: %(default)s)")
    add("--repeats", type=int, help="of every cell, interleaved (default: 3, quick 2)")
    add("--rounds", type=int, help="of requests in a run (default: 1 to 4, more for short prompts)")
    add("--quick", action="store_true", help=f"less of everything, {' and '.join(QUICK)} alone")
    add("--before", type=Path, metavar="CHECKOUT", help="with its .venv: measured beside, as 'before'")
    add("--serve-flags", default="", metavar="FLAGS", help="further ones of this checkout's serve")
    add("--instructions", choices=["avx2"], help="forbid all systems what is beyond (default: the CPU's own)")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--output-json", type=Path, metavar="FILE", help="write all numbers into this file, after each run")
    add("--plots", type=Path, metavar="DIRECTORY", help="draw them, too")
    add("--show", type=Path, metavar="FILE", help="measure nothing: the tables (and plots) of such a file")
    args = parser.parse_args()
    if args.quick:
        args.systems = args.systems or QUICK
    for name, usual, quick in CHOICES:
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else usual)
    if min([*args.lengths, *args.counts, *args.beside, args.repeats, args.rounds or 1]) < 1:
        parser.error("a count or a length is too small")
    args.more_systems = [BEFORE] if args.before is not None else []
    return args


def set_up(args: Args) -> None:
    """Add the system of ``--before``, the flags of ``--serve-flags`` and the limit of ``--instructions``."""
    if args.before is not None:
        python = args.before.absolute() / ".venv" / "bin" / "python"
        if not python.exists():
            raise SystemExit(f"--before: {python} does not exist: run make serve or .ci/install.py there")
        one: System = SYSTEMS["lockstep-dp1"]
        SYSTEMS[BEFORE] = replace(one, command=one.command.replace("{python}", shlex.quote(str(python)), 1))
    for name, system in SYSTEMS.items():
        if args.serve_flags and system.is_ours and name != BEFORE:
            SYSTEMS[name] = replace(system, command=f"{system.command} {args.serve_flags}")
    if args.instructions:
        SYSTEMS.update({name: system.only_avx2() for name, system in SYSTEMS.items()})


def main() -> int:
    args = parse_args()
    if args.before is not None or args.show is not None:
        SYSTEMS.setdefault(BEFORE, SYSTEMS["lockstep-dp1"])
    if args.show is not None:
        show(json.loads(args.show.read_text()), args.plots)
        return 0
    set_up(args)
    return bench_all(args, bench_model, show)


if __name__ == "__main__":
    sys.exit(main())
