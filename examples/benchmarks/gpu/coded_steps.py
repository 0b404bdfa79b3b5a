"""Products of quantised weights on a device: whether they are right, and times.

    python -m examples.benchmarks.gpu.coded_steps --device cuda --output build/coded.json

One matrix in the size of a feed-forward layer, in all kinds of codes, beside torch's product in bfloat16.
Copies of it are multiplied in turn, more than a device's cache holds, and replayed as a graph, so that
neither the cache nor the host's launches count. On a CPU Triton's interpreter runs them, which shows that the
script works and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from engine.gpu.coded_parameter import CodedWeight

KINDS = ("bfloat16", "int8", "int4", "fp8", "mxfp4", "w8a8")
SEED = 7
REPEATS = 20
COPIED_BYTES = 1 << 28
CACHED_BYTES = 200 << 20
"""More than the cache of a device holds."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    outputs, inputs = (96, 128) if options.tiny else (12288, 4096)
    device = torch.device(options.device)
    speed = _bytes_per_second(device)
    found: dict[str, Any] = {"outputs": outputs, "inputs": inputs, "copy_bytes_per_s": speed, "products": []}
    wrong = 0
    for kind in KINDS:
        weight = Weight(kind, outputs, inputs, device)
        for rows in options.rows:
            row = weight.measure(rows)
            row["limit_ms"] = weight.nbytes / speed * 1e3
            wrong += row["difference"] > row["tolerance"]
            found["products"].append(row)
            options.output.write_text(json.dumps(found, indent=2))
            print(
                f"{kind:9} {rows:5} rows: {row['ms']:8.3f} ms (reading {row['limit_ms']:.3f}),"
                f" differs by {row['difference']:.1e}",
                flush=True,
            )
    return 1 if wrong else 0


Product = Callable[[], torch.Tensor]


class Weight:
    """One matrix, in one kind of codes or plain."""

    def __init__(self, kind: str, outputs: int, inputs: int, device: torch.device) -> None:
        from engine.model.quantization.device_codes import device_codes
        from engine.model.quantization.rounding import Rounding
        from engine.model.quantization.stacks import TWICE
        from engine.model.quantization.weight_codes import Codes

        self.kind, self._device = kind, device
        numbers = torch.Generator().manual_seed(SEED)
        self._codes: list[CodedWeight] = []
        shape = (outputs, inputs)
        if kind == "bfloat16":
            plain = torch.randn(shape, generator=numbers).to(device, torch.bfloat16)
            self._plain = self._several(plain)
            return
        bits = 4 if kind in ("int4", "mxfp4") else 8
        if kind == "mxfp4":
            codes = TWICE[torch.randint(0, 16, shape, generator=numbers)]
        elif kind == "fp8":
            codes = torch.randn(shape, generator=numbers).to(torch.float8_e4m3fn).view(torch.int8)
        else:
            least, most = -(1 << bits - 1), 1 << bits - 1
            codes = torch.randint(least, most, shape, generator=numbers, dtype=torch.int8)
        groups = inputs // {"int4": 128, "mxfp4": 32}.get(kind, inputs)
        scales = torch.rand(outputs, groups, generator=numbers) * 0.01
        rounding = Rounding() if kind == "w8a8" else None
        is_float = kind in ("fp8", "mxfp4")
        one = device_codes(Codes(codes, scales, None, bits, is_float, rounding), device)
        assert one is not None
        self._codes = self._several(one)

    def _several(self, one: Any) -> list[Any]:
        """The matrix and copies of it."""
        count = math.ceil(CACHED_BYTES / one.nbytes) if self._device.type == "cuda" else 1
        return [one, *(copy.deepcopy(one) for _ in range(count - 1))]

    @property
    def nbytes(self) -> int:
        return int((self._codes or self._plain)[0].nbytes)

    def measure(self, rows: int) -> dict[str, Any]:
        """Milliseconds of a product, and how it differs from torch's in float32."""
        numbers = torch.Generator().manual_seed(rows)
        inputs = self._codes[0].inputs if self._codes else self._plain[0].shape[1]
        x = torch.randn(rows, inputs, generator=numbers).to(self._device, torch.bfloat16)
        products: list[Product]
        if self._codes:
            products = [partial(each.product, x) for each in self._codes]
            expected = self._codes[0].expected(0, x)
        else:
            products = [partial(torch.matmul, x, each.T) for each in self._plain]
            expected = x.float() @ self._plain[0].float().T
        found = products[0]().float()
        difference = float((found - expected).norm() / expected.norm())
        return {
            "kind": self.kind,
            "rows": rows,
            "ms": _milliseconds(products, self._device),
            "bytes": self.nbytes,
            "difference": difference,
            "tolerance": 1e-2,
        }


def _milliseconds(products: Sequence[Product], device: torch.device) -> float:
    """Time of one call, of many in a row that take turns."""
    turns = REPEATS if device.type == "cuda" else 1
    run = partial(_run, [products[turn % len(products)] for turn in range(turns)])
    if device.type == "cuda":
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
        run()
    _wait(device)
    began = time.perf_counter()
    run()
    _wait(device)
    return (time.perf_counter() - began) * 1e3 / turns


def _run(products: Sequence[Product]) -> None:
    for product in products:
        product()


def _bytes_per_second(device: torch.device) -> float:
    """What reading memory gives, by a copy, which reads half of what it moves."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    milliseconds = _milliseconds([partial(target.copy_, source)], device)
    return 2 * COPIED_BYTES / milliseconds * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
