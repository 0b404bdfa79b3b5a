"""Compiles every kernel for a device that is not here.

The sizes are those of real models.

    python -m tests.engine.gpu.compiled 90 bfloat16 qwen3-0.6b qwen3-30b-a3b

Run without ``TRITON_INTERPRET``. Prints one line per kernel, and fails if the compiler refuses one, if a program
wants more shared memory than the device has, if registers are spilled by the kilobyte, or if a later step
compiles what earlier ones have not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.attention import triton_paged
from engine.attention.base import LayerShape, PackedRows, Scoring
from engine.attention.prompt_size import PromptSize
from engine.gpu import (
    block_copies,
    coded_kernels,
    coded_products,
    few_experts,
    fixed_products,
    fused_launches,
    fused_layers,
    grouped_products,
    layer_products,
)
from engine.gpu.coded_products import DeviceCodes
from engine.gpu.grouped_experts import FEW_TOKENS
from engine.gpu.late_rotary import LateNorm, LateRotation
from engine.model.quantization.rounding import Rounding
from tests.engine.gpu.compiling import META, Compiled, compiling
from tests.nightly import NIGHTLY

SHARED = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
"""Bytes of shared memory that a program may have, by compute capability."""
MOST_STACK = {100: 384}
"""Bytes of a thread, 256 for others: more would be spilled registers.

Not held in float32, where 71 heads that share a KV head do not fit the registers. On 10.0 products with cuts
take 328: sums come from tensor memory a whole tile at a time."""
PROCESSORS = 132


@dataclass(frozen=True)
class Sizes:
    """One model."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    experts: int = 0
    top_k: int = 8
    is_transposed: bool = False
    """Weights of experts are [experts, in, out], and there are biases."""
    vocabulary: int = 151936


SHAPES = {
    "qwen3-0.6b": Sizes(1024, 3072, 16, 8, 128, 128),
    "qwen3-30b-a3b": Sizes(2048, 768, 32, 4, 128, 128, experts=128),
    "llama-3-70b": Sizes(8192, 28672, 64, 8, 128, 128, vocabulary=128256),
    "gemma-2-9b": Sizes(3584, 14336, 16, 8, 256, 256, window=4096, softcap=50.0, vocabulary=256000),
    "gpt-oss-20b": Sizes(
        2880, 2880, 64, 8, 64, 64, window=128, has_sinks=True, experts=32, top_k=4, is_transposed=True, vocabulary=201088,
    ),
    "odd": Sizes(1152, 1408, 12, 2, 80, 80, experts=60, top_k=3, vocabulary=32001),
    "apart": Sizes(5120, 1536, 16, 16, 192, 128, experts=160, top_k=6, vocabulary=102400),
    "one kv head": Sizes(4544, 18176, 71, 1, 64, 64, vocabulary=65024),
}  # fmt: skip


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


class Ordinary:
    """Copies that are not launched, through memory that is not page-locked."""

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def run(self, work: Callable[[], None]) -> None:
        work()

    def locked(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8)


class Steps:
    """Launches of one layer of one model, and of its sampler."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, *, fixed: bool = False) -> None:
        """``fixed``: as with ``--batch-invariant``."""
        self.sizes, self.dtype = sizes, dtype
        shape = LayerShape(sizes.kv_heads, sizes.key_dim, sizes.value_dim, sizes.window)
        self.cache = triton_paged.TritonPagedAttention(
            [shape],
            num_blocks=600,
            block_size=16,
            dtype=dtype,
            device=META,
            programs=triton_paged.PROGRAMS_PER_PROCESSOR * PROCESSORS,
            fixed=fixed,
        )

    def decode(self, rows: int) -> None:
        """A step whose rows have one token each."""
        self._layer(self.cache.decode_buffers(rows, 4096).plan(rows), rows)

    def captured(self, tokens: int, singles: int) -> None:
        """A step with prompts, filled up to a captured size."""
        size = PromptSize(tokens, singles, 16)
        self._layer(self.cache.prompt_buffers(size, 4096).plan(size), tokens)

    def mixed(self, counts: Sequence[int], starts: Sequence[int]) -> None:
        """A step with rows of these lengths, those of one token first."""
        lengths, first = np.array(counts), np.array(starts)
        positions = np.concatenate([np.arange(s, s + c) for s, c in zip(first, lengths, strict=True)])
        width = -(-int(positions.max() + 1) // 16)
        tables = np.zeros((len(lengths), width), dtype=np.int32)
        plan = self.cache.plan(PackedRows(first, lengths, tables, positions, int((lengths == 1).sum())))
        self._layer(plan, len(positions))

    def _layer(self, plan: Any, tokens: int) -> None:
        sizes, dtype = self.sizes, self.dtype
        hidden = empty(1, tokens, sizes.hidden, dtype=dtype)
        fused_launches.rms_norm(hidden, empty(sizes.hidden, dtype=dtype), 1e-6, plus_one=False)
        widths = [
            sizes.heads * sizes.key_dim,
            sizes.kv_heads * sizes.key_dim,
            sizes.kv_heads * sizes.value_dim,
        ]
        parts = empty(1, tokens, sum(widths), dtype=dtype).split(widths, dim=-1)
        dims = (sizes.key_dim, sizes.key_dim, sizes.value_dim)
        query, key, value = (part.view(1, tokens, -1, dim) for part, dim in zip(parts, dims, strict=True))
        weight = empty(sizes.key_dim, dtype=dtype)
        query, key = (fused_launches.rms_norm(each, weight, 1e-6, plus_one=True) for each in (query, key))
        angles = empty(1, tokens, sizes.key_dim, dtype=dtype)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        fused_launches.rotate(query, key, angles, angles)
        sinks = empty(sizes.heads, dtype=dtype) if sizes.has_sinks else None
        qkv = (query[0], key[0], value.transpose(1, 2)[0])
        norms = LateNorm(weight, 1e-6, False), LateNorm(weight, 1e-6, False)
        for more in (
            {},
            {"turn": LateRotation(angles, angles)},
            {"turn": LateRotation(angles, angles, norms)},
        ):
            plan.attend(0, *qkv, Scoring(0.1, sizes.softcap, sinks), **more)
        fused_launches.gated(empty(1, tokens, 2 * sizes.inner, dtype=dtype), tanh=sizes.softcap is not None)
        if sizes.experts:
            self._experts(hidden[0])

    def _experts(self, hidden: torch.Tensor) -> None:
        sizes, dtype = self.sizes, self.dtype
        shapes = {"gate_up_proj": (2 * sizes.inner, sizes.hidden), "down_proj": (sizes.hidden, sizes.inner)}
        module = SimpleNamespace(is_transposed=sizes.is_transposed, has_bias=sizes.is_transposed)
        for name, (out, width) in shapes.items():
            matrix = (width, out) if sizes.is_transposed else (out, width)
            setattr(module, name, empty(sizes.experts, *matrix, dtype=dtype))
            setattr(module, f"{name}_bias", empty(sizes.experts, out, dtype=dtype))
        ids = empty(len(hidden), sizes.top_k, dtype=torch.int64)
        if not sizes.is_transposed and len(hidden) <= FEW_TOKENS:
            module._apply_gate = fused_layers.FusedGate(tanh=False)
            few_experts.choose_experts(
                empty(len(hidden), sizes.experts, dtype=dtype), sizes.top_k, normalised=True
            )
            few_experts.few_forward(module, hidden, ids, empty(len(hidden), sizes.top_k, dtype=dtype))
        pairs = grouped_products.Pairs.of(ids, sizes.experts)
        linear = grouped_products.grouped_linear
        inner = fused_launches.gated(
            linear(module, "gate_up_proj", hidden, pairs, "triton", gather=True), tanh=False
        )
        outputs = linear(module, "down_proj", inner, pairs, "triton", gather=False)
        pairs.weighted_sum(outputs, empty(len(hidden), sizes.top_k, dtype=dtype), dtype)

    def coded(self, rows: int) -> None:
        """Products of this many rows by quantised weights of all kinds, and by experts'."""
        sizes, dtype = self.sizes, self.dtype
        hidden = empty(rows, sizes.hidden, dtype=dtype)
        bias = empty(sizes.inner, dtype=dtype)
        for codes in coded_matrices(sizes.inner, sizes.hidden):
            codes.product(hidden)
            if NIGHTLY:
                codes.product(hidden, bias)
        if sizes.experts and NIGHTLY:
            ids = empty(rows, sizes.top_k, dtype=torch.int64)
            pairs = grouped_products.Pairs.of(ids, sizes.experts)
            for codes in coded_matrices(sizes.inner, sizes.hidden, sizes.experts):
                codes.product(hidden, None, pairs, gather=True)

    def layer_products(self, rows: int) -> None:
        """Products of a layer that take in what stands beside them."""
        sizes, dtype = self.sizes, self.dtype
        hidden, inner = (
            empty(1, rows, sizes.hidden, dtype=dtype),
            empty(1, rows, 2 * sizes.inner, dtype=dtype),
        )
        up = empty(2 * sizes.inner, sizes.hidden, dtype=dtype)
        for plus_one in (False, True):
            norm = LateNorm(empty(sizes.hidden, dtype=dtype), 1e-6, plus_one)
            layer_products.layer_product(hidden, up, norm=norm)
        down = empty(sizes.hidden, sizes.inner, dtype=dtype)
        layer_products.layer_product(inner, down, gate=sizes.softcap is not None, residual=hidden)
        output, bias = empty(sizes.hidden, sizes.heads * sizes.value_dim, dtype=dtype), hidden[0, 0]
        attended = empty(1, rows, sizes.heads * sizes.value_dim, dtype=dtype)
        layer_products.layer_product(attended, output, bias, residual=hidden)

    def fixed_products(self, rows: int) -> None:
        """Products of so many rows with tiles of one size: few outputs, and many."""
        sizes, dtype = self.sizes, self.dtype
        for outputs in (sizes.kv_heads * sizes.key_dim, sizes.vocabulary):
            weight = empty(outputs, sizes.hidden, dtype=dtype)
            fixed_products.linear(empty(rows, sizes.hidden, dtype=dtype), weight)
        fixed_products.sum_of_rows(empty(rows, sizes.hidden, dtype=dtype))

    def copy_blocks(self, count: int) -> None:
        """Copies of so many KV blocks, both ways."""
        parts = [each.view(torch.uint8).view(len(each) // 16, -1) for each in self.cache.stored]
        copies = block_copies._KernelCopies(parts, Ordinary(), 8)
        rows = empty(count, sum(part.shape[1] for part in parts), dtype=torch.uint8)
        for gathers in (True, False):
            copies.copy(list(range(count)), rows, gathers=gathers)

    def sample(self, rows: int) -> None:
        """Races of so many rows."""
        float32 = torch.float32
        logits = empty(rows, self.sizes.vocabulary, dtype=float32)
        best, temperatures, lowest = (empty(rows, dtype=float32) for _ in range(3))
        keys, top_k = empty(rows, 2, dtype=torch.int32), empty(rows, dtype=torch.int32)
        for limits in (None, (top_k, empty(rows, dtype=float32))):
            fused_launches.race(logits, best, temperatures, lowest, keys, limits)


def coded_matrices(outputs: int, inputs: int, matrices: int = 1) -> Iterator[DeviceCodes]:
    """Quantised weights: all kinds at night, else two, and those that round inputs."""
    kinds = (coded_kernels.FLOAT8, coded_kernels.INT4)
    for kind in (*kinds, coded_kernels.INT8, coded_kernels.FLOAT4) if NIGHTLY else kinds:
        is_packed = kind in (coded_kernels.INT4, coded_kernels.FLOAT4)
        held = -(-inputs // coded_products.WORD) * coded_products.WORD // 2 if is_packed else inputs
        codes = empty(matrices, outputs, held, dtype=torch.uint8)
        for groups in (inputs // 32,) if is_packed else (1, inputs // (32 if inputs % 128 else 128)):
            scales = empty(matrices, groups, outputs, dtype=torch.float32)
            zeros = scales if kind == coded_kernels.INT4 else None
            yield DeviceCodes(codes, scales, zeros, kind, inputs)
    codes, scales = empty(matrices, outputs, inputs, dtype=torch.uint8), scales[:, :1]
    yield DeviceCodes(codes, scales, None, coded_kernels.INT8, inputs, rounding=Rounding())
    sums = empty(matrices, 4, outputs, dtype=torch.int32)
    rounding = Rounding(is_symmetric=False)
    yield DeviceCodes(codes, scales, None, coded_kernels.INT8, inputs, None, rounding, 4, sums)


def compile_all(capability: int, dtype: torch.dtype, sizes: Sizes) -> tuple[list[Compiled], list[Compiled]]:
    """What the steps of the start compile, and what later steps do."""
    with compiling(capability) as made:
        steps = Steps(sizes, dtype)
        steps.decode(256)  # the most rows, whose contexts are not cut
        steps.decode(1)
        steps.mixed([2048], [0])
        steps.mixed([1, 70, 9], [1000, 0, 33])
        steps.mixed([1, 9], [4, 0])
        for singles in (0, 63):
            steps.captured(64, singles)
        steps.sample(3)
        steps.copy_blocks(2)
        for rows in (1, 64, 8192):
            steps.coded(rows)
        for rows in (1, 16):
            steps.layer_products(rows)
        fixed = Steps(sizes, dtype, fixed=True)
        fixed.decode(1)
        fixed.mixed([1, 70, 9], [1000, 0, 33])
        fixed.mixed([1, 9], [4, 0])
        fixed.captured(64, 63)
        for rows in (1, 8192):
            fixed.fixed_products(rows)
        at_start = list(made)
        steps.decode(7)
        steps.mixed([1, 1, 1, 5], [0, 17, 900, 3])
        steps.mixed([1, 800], [3, 2])
        steps.mixed([1371], [5])
        steps.captured(384, 7)
        steps.captured(2048, 256)
        steps.sample(1)
        steps.sample(64)
        steps.copy_blocks(7)
        for rows in (7, 32):
            steps.layer_products(rows)
        for rows in (7, 33, 800, 1371):
            steps.coded(rows)
            fixed.fixed_products(rows)
        fixed.decode(7)
        fixed.mixed([1, 800], [3, 2])
        fixed.captured(384, 7)
    return at_start, made[len(at_start) :]


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """In place of a copy from page-locked memory, which needs a driver."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def main(capability: int, dtype: torch.dtype, names: Sequence[str]) -> int:
    triton_paged.upload = upload  # type: ignore[attr-defined]
    wrong = 0
    for name in names:
        at_start, later = compile_all(capability, dtype, SHAPES[name])
        for each in at_start:
            blocks = {key: size for key, size in each.constants.items() if key.startswith("BLOCK")}
            print(
                f"{name}: {each.name} {blocks}: {each.shared} B, {each.registers} registers, {each.stack} B"
            )
            spills = each.stack > MOST_STACK.get(capability, 256) and dtype.itemsize <= 2
            if each.shared > SHARED[capability] or spills:
                print(f"  does not fit sm_{capability}: {each.constants}", file=sys.stderr)
                wrong += 1
        for each in later:
            print(f"{name}: {each.name} is compiled while serving: {each.constants}", file=sys.stderr)
        wrong += len(later)
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3:] or list(SHAPES)))
