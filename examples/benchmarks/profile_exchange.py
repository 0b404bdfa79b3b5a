#!/usr/bin/env python3
"""Profile of a decode step of a mixture of experts that two instances share.

Times are to the microsecond, against two instances that each have all experts.

    python examples/benchmarks/profile_exchange.py                              # 16 experts, 61 M parameters
    python examples/benchmarks/profile_exchange.py build/models/moe-small --sequences 8 32 --members 2

As many processes as members, one compute thread each, the native kernels, no server: every member decodes
its part of the sequences, 160 tokens of context each. *over shared_memory* and *over tcp*: experts dealt out,
in lockstep, with the header exchange before each step. *whole*: all experts in each, the processes side by
side. Printed are microseconds per step by kind of operation, mean of the members. ``header``, ``look``,
``meet`` and ``home`` are waiting for the others' headers, rows and results. Over tcp, ``offer`` and
``return`` send them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from examples.benchmarks.bench_lockstep import MODELS, print_table

Transport = Literal["shared_memory", "tcp"]

CONTEXT = 160
HOST = "127.0.0.1"
TIMEOUT = 120.0


def member(
    model: str,
    rank: int,
    size: int,
    port: int,
    loads: list[int],
    steps: int,
    transport: Transport | None,
    answers: Any,
) -> None:
    """One instance: [seconds by kind, and "step" and "header"] of each load into ``answers``."""
    import numpy as np
    import torch

    from engine.config import ModelConfig
    from engine.kernels.cache.native_cache import NativeCache
    from engine.kernels.core import library
    from engine.kernels.core.operations import OperationKind
    from engine.kernels.decoder import recognise
    from engine.kernels.program import Program
    from engine.model.checkpoint import read_model_info
    from engine.model.expert_weights import ExpertShare
    from engine.model.weights import load_model
    from engine.roofline.work import packed_step
    from parallel.groups import form
    from parallel.links.meeting import MeetingClient
    from parallel.placement import assign_experts

    torch.set_num_threads(1)
    info, kernels = read_model_info(Path(model)), library.load()
    assert kernels is not None, "there are no native kernels here: see docs/design/kernels.md"
    placement = assign_experts(info.num_experts, size)
    share = ExpertShare(placement, rank) if transport is not None else None
    device, dtype = torch.device("cpu"), torch.bfloat16
    loaded = load_model(info, ModelConfig(), dtype=dtype, device=device, share=share)
    program = Program(kernels, recognise(loaded.module, loaded.layers, dtype), loaded.experts)
    program.use(NativeCache(loaded.layers, num_blocks=max(loads) * 16 + 16, block_size=16, dtype=dtype))
    meeting = MeetingClient(HOST, port, timeout=TIMEOUT)
    group = form(meeting, 1, rank, size, transport or "shared_memory", TIMEOUT, host=HOST)
    if loaded.experts is not None:
        program.spread()
        loaded.experts.join(group, placement)
        program.join(group, placement)
    results = []
    with torch.inference_mode():
        for load in loads:
            rows = [(CONTEXT, 1)] * max(1, load // size)
            packed, ids, wanted = packed_step(rows, loaded.vocab_size)
            ids = (ids + rank * 1009) % loaded.vocab_size
            header, seconds = 0.0, []
            for number in range(steps + 5):
                if number == 5:
                    before, header, seconds = program.seconds.copy(), 0.0, []
                began = time.perf_counter()
                if loaded.experts is not None:
                    group.all_gather_ints([number, len(rows), 0, 0, 0, 0, 0])
                    header += time.perf_counter() - began
                    loaded.experts.begin([len(rows)] * size)
                program.forward(packed, ids, wanted)
                seconds.append(time.perf_counter() - began)
            spent = (program.seconds - before) / steps
            found = {kind.name.lower(): float(spent[kind]) for kind in OperationKind}
            results.append(found | {"header": header / steps, "step": float(np.median(seconds))})
            group.all_gather_ints([0])
    answers.put(results)
    group.all_gather_ints([0])  # nobody leaves while others still wait
    group.close()


def profile(
    model: str, size: int, loads: list[int], steps: int, transport: Transport | None
) -> list[dict[str, float]]:
    """Mean of the members' seconds, for each load.

    ``transport``: of spread experts; None: each member has all of them.
    """
    from parallel.links.meeting import MeetingHost

    meeting = MeetingHost(HOST)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    members = [
        context.Process(
            target=member, args=(model, rank, size, meeting.port, loads, steps, transport, answers)
        )
        for rank in range(size)
    ]
    for each in members:
        each.start()
    found = [answers.get(timeout=10 * TIMEOUT) for _ in members]
    for each in members:
        each.join()
    return [
        {key: sum(one[place][key] for one in found) / size for key in found[0][place]}
        for place in range(len(loads))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("model", nargs="?", default=MODELS["moe-16"], help="a directory (default: moe-16, made if missing)")
    add("--members", type=int, default=2, help="(default: %(default)s)")
    add(
        "--sequences", type=int, nargs="+", default=[2, 8, 32], help="over all members (default: %(default)s)"
    )
    add(
        "--transports", choices=["shared_memory", "tcp"], nargs="+", default=["shared_memory", "tcp"],
        help="between the members (default: %(default)s)",
    )  # fmt: skip
    add("--steps", type=int, default=200, help="(default: %(default)s)")
    add("--output-json", type=Path, metavar="FILE", help="write all numbers into this file")
    args = parser.parse_args()
    if args.model == MODELS["moe-16"] and not Path(args.model, "config.json").exists():
        maker = Path(__file__).with_name("make_moe_model.py")
        subprocess.run([sys.executable, str(maker), args.model], check=True, stdout=sys.stderr)
    found = {
        name: profile(args.model, args.members, args.sequences, args.steps, transport)
        for name, transport in (*((f"over {each}", each) for each in args.transports), ("whole", None))
    }
    kinds = [k for k in found["whole"][0] if any(max(o[k] for o in found[n]) > 5e-6 for n in found)]
    kinds = ["step", "header", *(kind for kind in kinds if kind not in ("step", "header"))]
    rows = [
        [f"{load}", name, *(f"{1e6 * found[name][place][kind]:.0f}" for kind in kinds)]
        for place, load in enumerate(args.sequences)
        for name in found
    ]
    print_table(["sequences", "experts", *kinds], rows)
    if args.output_json is not None:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        page = {"model": args.model, "members": args.members, "sequences": args.sequences, "seconds": found}
        args.output_json.write_text(json.dumps(page, indent=1) + "\n")


if __name__ == "__main__":
    main()
