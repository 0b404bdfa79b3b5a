"""Native kernels against transformers' own eager model, at every position of random texts.

The texts of a family are cut into chunks at random and computed beside each other, as an instance does. In
float32 results have to be equal but for rounding. In bfloat16 both are held against float32 with the same
weights, where the kernels may be no farther off than transformers. ``make nightly`` compares 20,000 positions
of each family: ``python -m tests.engine.native_positions``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers

from engine.attention.base import PackedRows
from engine.config import ModelConfig
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.make import make_program
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.weights import _fix_rope_scaling, load_model
from tests.engine.native_families import CONTEXT, MIXTURES, NATIVE, make_family
from tests.engine.tiny_models import VOCAB

BLOCK_SIZE = 16
TABLE = CONTEXT // BLOCK_SIZE
MOST_TEXTS, MOST_CHUNK = 4, 1024
"""Texts that are computed side by side, and tokens of one text in a step."""
FLOAT32_TOLERANCE = 1e-3
NEAR_TIES = 0.01
"""Share of the positions of a mixture whose experts may be chosen otherwise.

In float32, one or two in a thousand of the tokens are near a tie, or have seen one.
"""
SLACK = 1.15
"""Tolerance between two ways of rounding that are equally good."""
PARTS = 4
"""Ranges of positions, each of which is judged by itself: a deviation may begin late."""


@dataclass(frozen=True)
class Deviations:
    """Distance of logits from float32, relative to how much these vary, by position."""

    positions: torch.Tensor
    by_kernels: torch.Tensor
    by_transformers: torch.Tensor
    """0 in float32."""

    def problem(self, dtype: torch.dtype, *, is_mixture: bool) -> str | None:
        """Description of what is wrong; None if nothing is."""
        if dtype == torch.float32:
            far = ~(self.by_kernels <= FLOAT32_TOLERANCE)
            if float(far.float().mean()) <= (NEAR_TIES if is_mixture else 0.0):
                return None
            first = int(self.positions[far].min())
            return f"{int(far.sum())} of {len(far)} positions differ, the first one is {first}"
        for part in self.positions.argsort().chunk(PARTS):
            ours, theirs = float(self.by_kernels[part].median()), float(self.by_transformers[part].median())
            if not ours <= SLACK * theirs:
                until = int(self.positions[part].max())
                return f"up to position {until} they are {ours:.2g} off, transformers {theirs:.2g}"
        return None


@dataclass(frozen=True)
class Both:
    """A model on disk, as the kernels compute it and as transformers does."""

    program: Program
    theirs: Any


def load_both(directory: Path, dtype: torch.dtype) -> Both:
    model = load_model(read_model_info(directory), ModelConfig(), dtype=dtype, device=torch.device("cpu"))
    program = make_program(model, BLOCK_SIZE)
    assert program is not None, "the kernels do not compute this model"
    blocks = MOST_TEXTS * TABLE
    program.use(NativeCache(program.cached, num_blocks=blocks, block_size=BLOCK_SIZE, dtype=dtype))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).eval()
    _fix_rope_scaling(theirs, model.context_length)  # an instance has one scaling for all lengths
    return Both(program, theirs)


def deviations(both: Both, texts: Iterator[list[list[int]]], numbers: Random) -> Deviations:
    """Deviations at the positions of texts; those of a group are computed side by side."""
    theirs, found = both.theirs, []
    exact = theirs if theirs.dtype == torch.float32 else deepcopy(theirs).float()
    for group in texts:
        for text, ours in zip(group, compute(both.program, group, numbers), strict=True):
            found.append(_compare(text, ours, theirs, exact))
    return Deviations(*(torch.cat(column) for column in zip(*found, strict=True)))


def draw_groups(numbers: Random, count: int) -> Iterator[list[list[int]]]:
    """Groups of random texts with ``count`` positions or more together."""
    done = 0
    while done < count:
        texts = draw_texts(numbers, count - done)
        yield texts
        done += sum(map(len, texts))


def _compare(text: list[int], ours: torch.Tensor, theirs: Any, exact: Any) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        wanted = exact(torch.tensor([text]), use_cache=False).logits[0]
        spread = (wanted - wanted.mean(dim=-1, keepdim=True)).norm(dim=-1)
        rounded = wanted if exact is theirs else theirs(torch.tensor([text]), use_cache=False).logits[0]
        off = [(each.float() - wanted).norm(dim=-1) / spread for each in (ours, rounded)]
    return torch.arange(len(text)), *off


def draw_texts(numbers: Random, room: int) -> list[list[int]]:
    """Random tokens: some texts of any length up to the context.

    Their lengths add up to ``room`` positions or a few more.
    """
    texts: list[list[int]] = []
    for _ in range(numbers.randint(1, MOST_TEXTS)):
        length = min(int(2 ** numbers.uniform(4, CONTEXT.bit_length())), CONTEXT, max(room, 16))
        texts.append([numbers.randrange(VOCAB) for _ in range(length)])
        room -= length
        if room <= 0:
            break
    return texts


def compute(program: Program, texts: Sequence[list[int]], numbers: Random) -> list[torch.Tensor]:
    """Logits of all texts, in steps of random chunks of some of them."""
    order = list(range(MOST_TEXTS * TABLE))
    numbers.shuffle(order)
    tables = np.array(order, dtype=np.int32).reshape(MOST_TEXTS, TABLE)
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    for rows in _steps([len(text) for text in texts], numbers):
        packed, places = _packed(rows, tables)
        ids = np.array([texts[text][position] for text, position in places])
        with torch.inference_mode():
            logits = program.forward(packed, ids, np.arange(len(ids))).clone()
        for (text, _, _), part in zip(rows, logits.split([count for _, _, count in rows]), strict=True):
            parts[text].append(part)
    return [torch.cat(part) for part in parts]


Row = tuple[int, int, int]
"""(text, start, count)"""


def _steps(lengths: Sequence[int], numbers: Random) -> Iterator[list[Row]]:
    """Rows of one token first."""
    done = [0] * len(lengths)
    while any(now < length for now, length in zip(done, lengths, strict=True)):
        rows = []
        for text, length in enumerate(lengths):
            if done[text] < length and numbers.random() < 0.8:
                chunk = 1 if numbers.random() < 0.3 else numbers.randint(1, MOST_CHUNK)
                rows.append((text, done[text], min(chunk, length - done[text])))
                done[text] += rows[-1][2]
        if rows:
            yield sorted(rows, key=lambda row: row[2] > 1)


def _packed(rows: list[Row], tables: np.ndarray[Any, Any]) -> tuple[PackedRows, list[tuple[int, int]]]:
    places = [(text, position) for text, start, count in rows for position in range(start, start + count)]
    starts, counts = np.array([row[1] for row in rows]), np.array([row[2] for row in rows])
    positions = np.array([position for _, position in places])
    table = tables[[row[0] for row in rows]]
    return PackedRows(starts, counts, table, positions, int((counts == 1).sum())), places


def check(family: str, dtype: torch.dtype, count: int, seed: int = 0) -> str | None:
    """Description of what is wrong with a family; None if nothing is."""
    numbers = Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        both = load_both(make_family(Path(directory), family, seed), dtype)
        found = deviations(both, draw_groups(numbers, count), numbers)
    return found.problem(dtype, is_mixture=is_mixture(family))


def is_mixture(family: str) -> bool:
    return "moe" in family or family in ("mixtral", *MIXTURES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(NATIVE)}; all by default")
    parser.add_argument("--positions", type=int, default=20_000, help="of each family and data type")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", default="1/1", help="which part of the families, such as 2/4")
    arguments = parser.parse_args()
    failed = False
    first, step = map(int, arguments.share.split("/"))
    for family in (arguments.families or list(NATIVE))[first - 1 :: step]:
        for dtype in (torch.float32, torch.bfloat16):
            began = time.monotonic()
            problem = check(family, dtype, arguments.positions, arguments.seed)
            failed |= problem is not None
            print(f"{family}, {dtype}: {problem or 'ok'} ({time.monotonic() - began:.0f} s)", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
