#!/usr/bin/env python3
"""Cost of a token's choice and of its log-probabilities, by what a request asks for.

    python examples/benchmarks/kernels/choosing_costs.py
    LOCKSTEP_NATIVE_KERNELS=avx2 python examples/benchmarks/kernels/choosing_costs.py --vocabulary 32000

Made-up logits of one row go through the native kernels, on one thread. Printed is the least CPU time of a
call, for rows with some likely tokens and for flat ones, where nearly all tokens stay in the running.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

import numpy as np
import torch

from engine.kernels.choosing import logits as kernels
from engine.kernels.core import library
from engine.kernels.core.library import KernelLibrary
from engine.sampling import SamplingParams
from examples.benchmarks.bench_lockstep import print_table
from parallel.kernel_kinds import KINDS
from router.tools.bench.report import machine

DRAWS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "top-k 50, top-p 0.9": SamplingParams(top_k=50, top_p=0.9),
}
SPREADS = {"likely tokens": 3.0, "flat": 0.5}
"""Standard deviations of the made-up logits."""
HISTORY = 2000
"""Tokens that penalties count."""

Call = Callable[[torch.Tensor], object]


def calls_of(native: KernelLibrary, vocabulary: int) -> dict[str, Call]:
    """What is measured, each a call with the logits of one row."""
    position, target = np.array([100]), np.array([7])
    generator = np.random.default_rng(0)
    mask = generator.integers(0, 256, vocabulary // 8 + 1, dtype=np.uint8)
    params = SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5)
    history = kernels.TokenHistory(0, generator.integers(0, vocabulary, HISTORY), HISTORY // 2, params)

    def drawn(how: SamplingParams) -> Call:
        row = kernels.draws([kernels.draw_of(how, 5)])
        return lambda logits: kernels.draw(native, logits, row, position)

    def logprobs(top: int) -> Call:
        return lambda logits: kernels.logprobs(native, logits, target, top)

    return {
        **{name: drawn(how) for name, how in DRAWS.items()},
        f"penalties, {HISTORY} tokens": lambda logits: kernels.penalise(native, logits, [history], 0),
        "mask of a grammar": lambda logits: kernels.leave_out(native, logits, [0], [mask], 0),
        **{f"log-probabilities, top {top}": logprobs(top) for top in (0, 5, 20)},
    }


def least(call: Call, logits: torch.Tensor, times: int) -> float:
    """CPU seconds of the fastest call, each with fresh logits."""
    found = []
    for _ in range(times):
        own = logits.clone()
        began = time.thread_time()
        call(own)
        found.append(time.thread_time() - began)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--vocabulary", type=int, default=150_000, help="tokens (default: %(default)s)")
    parser.add_argument("--times", type=int, default=100, help="of each, the fastest counts (default: 100)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    native = library.load()
    if native is None:
        raise SystemExit("there are no native kernels here: see docs/design/kernels.md")
    print(f"{KINDS[native.kind(bfloat16=True)].title}, {args.vocabulary} tokens; {machine()}\n")
    random = torch.randn(1, args.vocabulary, generator=torch.Generator().manual_seed(0))
    lines = []
    for name, call in calls_of(native, args.vocabulary).items():
        seconds = [least(call, random * spread, args.times) for spread in SPREADS.values()]
        lines.append([name, *(f"{1e6 * each:.0f}" for each in seconds)])
    print_table(["us of CPU time", *SPREADS], lines)


if __name__ == "__main__":
    main()
