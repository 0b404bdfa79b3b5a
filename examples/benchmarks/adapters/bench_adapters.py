#!/usr/bin/env python3
r"""Benchmark of many low-rank adapters at once, against the model alone and against vLLM.

    python examples/benchmarks/adapters/bench_adapters.py --model build/models/dense-small

Both systems start with the same random adapters (rank 16, all projections of attention and MLPs). In turn
each answers requests of the model alone, and requests of which each eighth has an adapter of its own. With
``--adapters 64`` there are so many, and eight of them at once. Printed are output tokens a second, medians
over the repeats, and the time to the first token of one of these adapters, which may not be in use (cold).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.bench_peers import LOWEST_ID
from examples.benchmarks.machine_limits import calibrate
from examples.benchmarks.peer_systems import SYSTEMS, started, until_ready
from router.tools.bench.client import BenchTarget, session
from router.tools.bench.client import run as send_all
from router.tools.bench.datasets import BenchRequest
from router.tools.bench.report import summary

AT_ONCE = 8
"""Adapters of one run."""
PROMPT, ANSWER = 128, 64
"""Tokens of a prompt, and of an answer."""
HIGHEST_ID = 8000
"""Token ids of prompts end here."""
COLD = "cold, ms to the first token"
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OURS = "--enable-lora --max-loras {at_once} --max-lora-rank {rank} --lora-modules {modules}"
FLAGS = {"lockstep-dp1": OURS, "vllm-cores": OURS + " --max-cpu-loras {count}"}

Rates = dict[str, dict[str, list[float]]]
"""By system and cell, one of each repeat."""


def make_adapters(model: Path, directory: Path, count: int, rank: int) -> list[Path]:
    """Random adapters of a model, in PEFT's format."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    places = [directory / f"a{number}" for number in range(count)]
    if all((place / "adapter_model.safetensors").exists() for place in places):
        return places
    base = AutoModelForCausalLM.from_pretrained(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LAYERS))
    for place in places:
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        adapted.save_pretrained(place)
    return places


async def measured(
    url: str, names: Sequence[str], concurrency: int, rounds: int, seed: str
) -> tuple[float, float]:
    """Tokens a second, and median milliseconds to the first token, of these models' requests."""
    chance = random.Random(seed)
    each = concurrency // len(names)

    async def of_one(name: str) -> Any:
        prompts = [
            [chance.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(PROMPT)] for _ in range(each * rounds)
        ]
        asks = [[BenchRequest(prompt, ANSWER)] for prompt in prompts]
        target = BenchTarget(
            base_url=url,
            endpoint="/v1/completions",
            model=name,
            temperature=0.0,
            ignore_eos=True,
            extra_body={},
        )
        async with session() as http:
            return await send_all(http, target, asks, concurrency=each)

    found = await asyncio.gather(*map(of_one, names))
    outcomes = [outcome for several, _ in found for outcome in several]
    result = summary(outcomes, max(seconds for _, seconds in found), described={})
    if result["failed"]:
        raise SystemExit(f"{result['failed']} requests failed: {next(filter(None, result['errors']))}")
    return result["output_throughput"], result["p50_ttft_ms"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--systems", nargs="+", choices=[*FLAGS], default=[*FLAGS])
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--adapters", type=int, default=AT_ONCE, help="(default: %(default)s)")
    add("--rank", type=int, default=16, help="(default: %(default)s)")
    add("--concurrency", type=int, nargs="+", default=[8, 32], help="(default: 8 32)")
    add("--repeats", type=int, default=3, help="(default: %(default)s)")
    add("--rounds", type=int, default=4, help="(default: %(default)s)")
    add("--output-json", type=Path)
    args = parser.parse_args()
    if args.adapters < AT_ONCE or any(each % AT_ONCE for each in args.concurrency):
        parser.error(f"adapters and requests at once come in multiples of {AT_ONCE}")
    return args


def bench(urls: dict[str, str], names: list[str], args: argparse.Namespace) -> Rates:
    """Rates of all systems, each cell in turn."""
    rates: Rates = {name: {} for name in urls}
    for repeat in range(args.repeats):
        some = random.Random(repeat).sample(names, AT_ONCE)
        for concurrency in args.concurrency:
            cells = [("base", ["bench"], concurrency, args.rounds)]
            cells += [(COLD, some[:1], 1, 1), ("adapters", some, concurrency, args.rounds)]
            for (kind, models, at_once, rounds), name in itertools.product(cells, urls):
                run = measured(urls[name], models, at_once, rounds, f"{repeat} {kind}")
                rate, first = asyncio.run(run)
                cell = kind if kind == COLD else f"{kind}, {concurrency} at once"
                rates[name].setdefault(cell, []).append(first if kind == COLD else rate)
                print(f"{name}: {cell}: {rate:.0f} tokens/s, {first:.0f} ms", file=sys.stderr, flush=True)
    return rates


def main() -> int:
    args = parse_args()
    model = args.model.absolute()
    directory = model.parent / f"{model.name}-adapters-{args.rank}"
    places = make_adapters(model, directory, args.adapters, args.rank)
    modules = " ".join(f"{place.name}={place}" for place in places)
    for name in args.systems:
        flags = FLAGS[name].format(at_once=AT_ONCE, rank=args.rank, modules=modules, count=args.adapters)
        SYSTEMS[name] = replace(SYSTEMS[name], command=f"{SYSTEMS[name].command} {flags}")
    before, names = calibrate(), [place.name for place in places]
    with ExitStack() as stack:
        urls = {}
        for name in args.systems:
            child, urls[name], log = stack.enter_context(started(name, model, args.dtype))
            until_ready(child, urls[name], log)
            asyncio.run(measured(urls[name], names[:AT_ONCE], AT_ONCE, 1, "warm"))
        rates = bench(urls, names, args)
    print(f"{args.model.name}, {args.dtype}, {args.adapters} adapters of rank {args.rank}")
    print(f"machine before and after: {before}, {calibrate()}")
    for name, cells in rates.items():
        for cell, values in cells.items():
            print(
                f"{name:14} {cell:28} {statistics.median(values):8.1f}  ({min(values):.1f}-{max(values):.1f})"
            )
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(rates, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
