"""Bits of a row alone and in batches: the first operator that differs.

    python3 -m examples.benchmarks.gpu.bits_matrix --output build/bits.json
    python3 -m examples.benchmarks.gpu.bits_matrix --device cpu --tiny --output build/bits.json

Each operator is that of a decode step in the shape of Qwen3-0.6B, the experts those of Qwen3-30B-A3B: as it
is by default, and with ``--batch-invariant``. One row stays the same; its neighbours and their number change.
Each cell is written when it is known. Milliseconds are those of a call, with its launches.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # triton asks when it is loaded

import torch
import torch.nn.functional as F

from engine.attention.base import LayerShape, PackedRows, Scoring
from engine.attention.triton_paged import TritonPagedAttention
from engine.compute.decode_graphs import CudaCapture
from engine.compute.device_blocks import DeviceBlocks
from engine.compute.logits_backend import SampleRow
from engine.compute.token_rules import TokenRules
from engine.compute.torch_logits import TorchLogits
from engine.gpu import fixed_products, fused_launches
from engine.gpu.grouped_experts import fixed_forward, grouped_forward
from engine.sampling import SamplingParams
from examples.benchmarks.gpu.whole_files import write_whole

BLOCK = 16
REPEATS = 5
MODES = ("default", "batch-invariant")
Cell = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer, and what changes beside a row."""

    hidden: int = 1024
    inner: int = 3072
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    vocabulary: int = 151936
    experts: int = 128
    expert_hidden: int = 2048
    expert_inner: int = 768
    top_k: int = 8
    rows: tuple[int, ...] = (1, 2, 8, 32, 256)
    contexts: tuple[int, ...] = (100, 1000, 4000)
    short: int = 5
    long: int = 4000


TINY = Sizes(64, 96, 4, 2, 16, 300, 4, 64, 48, 2, (1, 2), (20, 150), 5, 150)


@dataclass
class Report:
    """Cells in a JSON file, written again at each one."""

    path: Path
    cells: list[Cell] = field(default_factory=list)
    facts: Cell = field(default_factory=dict)

    def add(self, **cell: Any) -> None:
        self.cells.append(cell)
        write_whole(self.path, json.dumps(self.facts | self.summary() | {"cells": self.cells}, indent=1))

    def summary(self) -> Cell:
        """Operators that differ by mode, in a step's order, and the first cell."""
        found: Cell = {}
        for mode in MODES:
            differ = [each for each in self.cells if each["mode"] == mode and not each["equal"]]
            names = list(dict.fromkeys(each["operator"] for each in differ))
            found[mode] = {"differ": names, "first": differ[0] if differ else None}
        return found


class Operators:
    """The operators of a step on one device: each gives its first row's results."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.dtype = torch.bfloat16
        self._numbers = torch.Generator().manual_seed(11)
        most = max(sizes.rows)
        self.hidden = self.random(most, sizes.hidden)
        q, kv = sizes.heads * sizes.dim, sizes.kv_heads * sizes.dim
        self.matrices = {
            "q, k and v": (q + 2 * kv, sizes.hidden),
            "attention's output": (sizes.hidden, q),
            "gate and up": (2 * sizes.inner, sizes.hidden),
            "down": (sizes.hidden, sizes.inner),
            "logits": (sizes.vocabulary, sizes.hidden),
        }

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._numbers).to(self.device, self.dtype)

    def norm(self, mode: str) -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
        del mode  # the same kernel
        weight = self.random(self.sizes.hidden)
        norm = partial(fused_launches.rms_norm, weight=weight, epsilon=1e-6, plus_one=False)
        yield "norm", lambda rows: norm(self.hidden[None, :rows])[0]

    def products(self, mode: str) -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
        multiply = F.linear if mode == "default" else fixed_products.linear
        for name, (outputs, inputs) in self.matrices.items():
            weight, rows_of = self.random(outputs, inputs), self.random(max(self.sizes.rows), inputs)
            yield f"product: {name}", lambda rows, x=rows_of, w=weight: multiply(x[:rows], w)  # type: ignore[misc]

    def experts(self, mode: str) -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
        sizes = self.sizes
        inner, width = sizes.expert_inner, sizes.expert_hidden
        module = SimpleNamespace(
            num_experts=sizes.experts,
            is_transposed=False,
            has_bias=False,
            has_gate=True,
            gate_up_proj=self.random(sizes.experts, 2 * inner, width),
            down_proj=self.random(sizes.experts, width, inner),
            _apply_gate=lambda rows: fused_launches.gated(rows, tanh=False),
        )
        hidden = self.random(max(sizes.rows), width)
        chosen = self.random(max(sizes.rows), sizes.experts).float().topk(sizes.top_k)
        weights = chosen.values.softmax(-1).to(self.dtype)
        forward = grouped_forward if mode == "default" else fixed_forward
        yield "experts", lambda rows: forward(module, hidden[:rows], chosen.indices[:rows], weights[:rows])

    def sampler(self, mode: str) -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
        logits = 3 * self.random(max(self.sizes.rows), self.sizes.vocabulary)
        nothing = np.zeros(0, dtype=np.int64)
        backend = TorchLogits(row_by_row=mode != "default", by_kernel=True)
        for name, limits in (("draw", {}), ("draw with top-k and top-p", {"top_k": 20, "top_p": 0.95})):
            params = SamplingParams(temperature=0.8, **limits)  # type: ignore[arg-type]
            of_rows = [SampleRow(params, i, 7, nothing, 0, TokenRules(params)) for i in range(len(logits))]
            yield name, lambda rows, r=of_rows: backend.draw(logits[:rows], r[:rows])  # type: ignore[misc]
        targets = torch.zeros(len(logits), dtype=torch.int64, device=self.device)
        yield "log-probabilities", lambda rows: backend.logprob_table(logits[:rows], targets[:rows], 5)


class Attention:
    """Attention of a row with one context, beside rows with others."""

    def __init__(self, operators: Operators, mode: str) -> None:
        sizes = self.sizes = operators.sizes
        self._operators = operators
        self.pages = -(-(sizes.long + 1) // BLOCK)
        most = max(sizes.rows)
        self.cache = TritonPagedAttention(
            [LayerShape(sizes.kv_heads, sizes.dim, sizes.dim, None)],
            num_blocks=self.pages + most,
            block_size=BLOCK,
            dtype=operators.dtype,
            device=operators.device,
            fixed=mode != "default",
        )
        kept = (self.pages + most + 1) * BLOCK
        for tensor in (self.cache.keys[0], self.cache.values[0]):
            tensor.copy_(operators.random(kept, sizes.kv_heads, sizes.dim))
        self.query = operators.random(sizes.heads, most, sizes.dim)
        self.key, self.value = operators.random(2, sizes.kv_heads, most, sizes.dim)

    def rows(self, context: int, beside: int, count: int) -> PackedRows:
        """A row of this context first; each has a block of its own."""
        starts = np.array([context, *[beside] * (count - 1)]) - 1
        tables = np.tile(np.arange(self.pages, dtype=np.int32), (count, 1))
        tables[np.arange(count), starts // BLOCK] = self.pages + np.arange(count)
        return PackedRows(starts, np.ones_like(starts), tables, starts, count)

    def eager(self, context: int, beside: int, count: int) -> torch.Tensor:
        plan = self.cache.plan(self.rows(context, beside, count))
        query, key, value = (each[:, :count] for each in (self.query, self.key, self.value))
        return plan.attend(0, query, key, value, Scoring(self.sizes.dim**-0.5))

    def captured(self, count: int) -> Callable[[int, int], torch.Tensor]:
        """The same from a graph for so many rows; on a CPU again without."""
        buffers = self.cache.decode_buffers(count, self.sizes.long + BLOCK)
        query, key, value = (each[:, :count].contiguous() for each in (self.query, self.key, self.value))
        scoring = Scoring(self.sizes.dim**-0.5)

        def compute() -> torch.Tensor:
            return buffers.plan(count).attend(0, query, key, value, scoring)

        device = self._operators.device
        replay = CudaCapture(device)(compute) if device.type == "cuda" else compute

        def run(context: int, beside: int) -> torch.Tensor:
            buffers.fill(self.rows(context, beside, count), count)
            return replay()

        return run


def timed(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, float]:
    """Results of a call, and the least milliseconds of some."""
    times = []
    for _ in range(REPEATS if device.type == "cuda" else 1):
        began = time.perf_counter()
        found = call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return found.clone(), min(times)


def compare_rows(operators: Operators, mode: str, report: Report, deadline: float) -> None:
    """Operators that know nothing of contexts."""
    kinds = (operators.norm, operators.products, operators.experts, operators.sampler)
    for name, call in (each for kind in kinds for each in kind(mode)):
        alone: torch.Tensor | None = None
        for rows in operators.sizes.rows:
            if time.monotonic() > deadline:
                return
            found, ms = timed(lambda rows=rows, call=call: call(rows), operators.device)  # type: ignore[misc]
            alone = found[:1] if alone is None else alone
            is_equal = torch.equal(found[:1], alone)
            report.add(operator=name, mode=mode, rows=rows, equal=is_equal, ms=round(ms, 4))


def compare_contexts(operators: Operators, mode: str, report: Report, deadline: float) -> None:
    """Attention, by context, neighbours, and eager or captured."""
    sizes, attention = operators.sizes, Attention(operators, mode)
    alone = {context: attention.eager(context, 1, 1)[:1].clone() for context in sizes.contexts}
    for rows in sizes.rows:
        replay = attention.captured(rows)
        for context in sizes.contexts:
            for beside in (sizes.short, sizes.long) if rows > 1 else (sizes.short,):
                for how in ("eager", "graph"):
                    if time.monotonic() > deadline:
                        return
                    found, ms = timed(
                        (lambda: attention.eager(context, beside, rows))  # noqa: B023 (called at once)
                        if how == "eager"
                        else (lambda: replay(context, beside)),  # noqa: B023
                        operators.device,
                    )
                    report.add(
                        operator="attention",
                        mode=mode,
                        rows=rows,
                        context=context,
                        beside=beside,
                        how=how,
                        equal=torch.equal(found[:1], alone[context]),
                        ms=round(ms, 4),
                    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--seconds", type=float, default=280.0, help="after which nothing new is begun")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    deadline = time.monotonic() + options.seconds
    report = Report(options.output)
    report.facts["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    with torch.inference_mode():
        for mode in MODES:
            operators = Operators(TINY if options.tiny else Sizes(), device)
            compare_contexts(operators, mode, report, deadline)
            if mode == "default":
                compare_rows(operators, mode, report, deadline)
            else:
                with DeviceBlocks(device):
                    compare_rows(operators, mode, report, deadline)
            print(mode, json.dumps(report.summary()[mode]), flush=True)
    if time.monotonic() > deadline:
        print("no time was left for some cells")
    return 1 if report.summary()["batch-invariant"]["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
