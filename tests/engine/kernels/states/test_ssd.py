"""State space duality by rows against float64, and its bits however a context is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from engine.kernels.cache.native_states import NativeStates
from engine.kernels.core import library
from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.operations import NORM_LAST, OperationKind, OperationList, StepArguments
from engine.kernels.core.rows import spaced
from engine.kernels.states.ssd_sizes import Sizes
from engine.states.grid import NATIVE_GRID
from engine.states.held import StateRows
from engine.step import RowPieces

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

SIZES = [
    Sizes(heads=8, groups=2, width=64, size=128),
    Sizes(heads=6, groups=1, width=16, size=24),
    Sizes(heads=5, groups=5, width=7, size=10),
    Sizes(heads=9, groups=3, width=48, size=33),
    Sizes(heads=12, groups=2, width=80, size=16),
]
LIMITS = [(0.0, float("inf")), (0.2, 0.5)]
TOKENS = 150
MOST_REQUESTS = 5
SLOTS_EACH = TOKENS // NATIVE_GRID + 1
"""Slots of a request, one for each boundary."""


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Context:
    """Made-up inputs of one layer for a context."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, seed: int, tokens: int = TOKENS) -> None:
        numbers = np.random.default_rng(seed)
        self.given = self._drawn(numbers, tokens, sizes.convolved).to(dtype)
        self.steps = self._drawn(numbers, tokens, sizes.heads).to(dtype)

    @staticmethod
    def _drawn(numbers: np.random.Generator, *shape: int) -> torch.Tensor:
        return torch.from_numpy(numbers.standard_normal(shape, dtype=np.float32))


class Layer:
    """One layer of which nothing but the recurrence is computed; requests lie in slots."""

    def __init__(
        self,
        sizes: Sizes,
        dtype: torch.dtype,
        limits: tuple[float, float] = LIMITS[0],
        kernels: KernelLibrary | None = None,
    ) -> None:
        self.sizes, self.dtype, self.limits = sizes, dtype, limits
        found = kernels or library.load()
        assert found is not None
        self._library = found
        self.states = NativeStates([sizes.state(kernel=4)], dtype)
        self.states.allocate(MOST_REQUESTS * SLOTS_EACH)
        assert self.states.pool is not None
        for tensor in self.states.pool.layers[0]:
            assert tensor is not None
            tensor.fill_(float("nan"))
        drawn = torch.from_numpy(np.random.default_rng(0).standard_normal((4, sizes.heads), dtype=np.float32))
        self.of_heads = torch.stack([-drawn[0].exp(), drawn[1] - 1, drawn[2], 1 + 0.2 * drawn[3]])

    def run(self, rows: Sequence[tuple[int, int, Context, int]]) -> list[torch.Tensor]:
        """Results [count, inner] of rows (request, start, its inputs, count) of one step."""
        sizes, pieces = self.sizes, {}
        for index, (request, start, _, count) in enumerate(rows):
            last = (start + count) // NATIVE_GRID * NATIVE_GRID
            if last > start // NATIVE_GRID * NATIVE_GRID:
                slot = request * SLOTS_EACH + last // NATIVE_GRID
                pieces[index] = RowPieces(fills={last: [slot]})
        slots, starts, _, counts = zip(*rows, strict=True)
        given = spaced(torch.cat([each.given[start : start + count] for _, start, each, count in rows]))
        steps = spaced(torch.cat([each.steps[start : start + count] for _, start, each, count in rows]))
        out = torch.full((sum(counts), sizes.inner), float("nan"))
        operations = OperationList(1)
        operations.add(
            OperationKind.SSD_ROWS,
            into=given,
            out=out,
            weights=steps.data_ptr(),
            n=sizes.heads,
            extra=self.states.records[0],
            more=self.of_heads,
            groups=sizes.groups,
            number=self.limits[0],
            cap=self.limits[1],
        )
        with self.states.step(StateRows(slots, starts, counts, pieces)):
            arguments = StepArguments(
                tokens=len(out),
                starts=np.array(starts),
                counts=np.array(counts),
                offsets=np.cumsum([0, *counts[:-1]]),
                **self.states.arguments(),
            )
            assert operations.run(self._library, arguments, self.dtype)
        return list(out.split(list(counts)))

    def whole(self, context: Context) -> torch.Tensor:
        """Results of a context in one row, by a layer of its own."""
        layer = Layer(self.sizes, self.dtype, self.limits, self._library)
        return layer.run([(0, 0, context, len(context.given))])[0]


def expected(layer: Layer, context: Context, kind: torch.dtype) -> torch.Tensor:
    """Results token by token."""
    sizes = layer.sizes
    x, b, c = (
        each.to(kind)
        for each in context.given.split([sizes.inner, *(2 * [sizes.groups * sizes.size])], dim=1)
    )
    b, c = (
        each.unflatten(1, (sizes.groups, -1)).repeat_interleave(sizes.heads // sizes.groups, dim=1)
        for each in (b, c)
    )
    x = x.unflatten(1, (sizes.heads, -1))
    decay, bias, skip, scale = layer.of_heads.to(kind)
    steps = torch.nn.functional.softplus(context.steps.to(kind) * scale + bias).clamp(*layer.limits)
    state, rows = torch.zeros(sizes.heads, sizes.width, sizes.size, dtype=kind), []
    for token, step in enumerate(steps):
        state = state * (step * decay).exp()[:, None, None]
        state = state + (step[:, None] * x[token])[:, :, None] * b[token][:, None]
        rows.append((state * c[token][:, None]).sum(-1) + skip[:, None] * x[token])
    return torch.stack(rows).flatten(1)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_numbers_are_as_near_to_float64_as_the_librarys(
    sizes: Sizes, limits: tuple[float, float], dtype: torch.dtype
) -> None:
    layer, context = Layer(sizes, dtype, limits), Context(sizes, dtype, seed=1)
    layer.of_heads[3] = 1.0
    found = layer.run([(0, 0, context, TOKENS)])[0].double()
    x, b, c = context.given.float().split([sizes.inner, *(2 * [sizes.groups * sizes.size])], dim=1)
    scanned = mamba2_chunk_scan(
        x.unflatten(1, (sizes.heads, -1))[None],
        context.steps.float()[None],
        layer.of_heads[0],
        *(each.unflatten(1, (sizes.groups, -1))[None] for each in (b, c)),
        chunk_size=64,
        D=layer.of_heads[2],
        dt_bias=layer.of_heads[1],
        dt_softplus=True,
        dt_limit=limits,
    )
    right = expected(layer, context, torch.float64)
    librarys = (scanned.flatten(2)[0].double() - right).norm()
    assert (found - right).norm() < 2 * librarys + 1e-7 * right.norm()


@pytest.mark.parametrize("avx2", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_do_not_depend_on_how_a_context_is_cut(sizes: Sizes, avx2: bool, dtype: torch.dtype) -> None:
    kernels = library.opened("avx2" if avx2 else None)
    for cut in ([1] * TOKENS, [7] * 30, [16] * 10, [50] * 3, [64] * 3, [3, 1, 20, 40, 1, 1, 14, 70]):
        layer, context = Layer(sizes, dtype, kernels=kernels), Context(sizes, dtype, seed=2)
        at, rows = 0, []
        for count in cut:
            some = min(count, TOKENS - at)
            rows += layer.run([(0, at, context, some)]) if some else []
            at += some
        assert torch.equal(torch.cat(rows), layer.whole(context)), cut


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_in_company_with_drafts_and_steps_again_have_the_bits_alone(
    threads: int, dtype: torch.dtype
) -> None:
    torch.set_num_threads(threads)
    sizes, numbers = SIZES[0], random.Random(4)
    layer = Layer(sizes, dtype)
    contexts = [Context(sizes, dtype, seed) for seed in range(MOST_REQUESTS)]
    refused = Context(sizes, dtype, seed=99)
    at = [0] * len(contexts)
    found: list[list[torch.Tensor]] = [[] for _ in contexts]
    while any(each < TOKENS for each in at):
        going = [request for request, position in enumerate(at) if position < TOKENS]
        rows = []
        for request in numbers.sample(going, numbers.randint(1, len(going))):
            count = min(numbers.choice([1, 1, 1, 5, 16, 33]), TOKENS - at[request])
            rows.append((request, at[request], contexts[request], count))
        if (
            numbers.random() < 0.4
        ):  # drafts that do not reach a boundary, and are refused; or a step that runs again
            drafted = [(r, s, refused, min(3, NATIVE_GRID - 1 - s % NATIVE_GRID)) for r, s, _, _ in rows]
            layer.run([each for each in drafted if each[3] > 0] or rows[:1])
        for (request, _, _, count), result in zip(rows, layer.run(rows), strict=True):
            found[request].append(result)
            at[request] += count
    for context, rows_of_it in zip(contexts, found, strict=True):
        assert torch.equal(torch.cat(rows_of_it), layer.whole(context))


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize(("width", "groups"), [(96, 1), (96, 3), (70, 5)])
def test_a_gated_norm_in_groups(width: int, groups: int, is_last: bool, dtype: torch.dtype) -> None:
    kernels = library.load()
    assert kernels is not None
    rows, gate = torch.randn(5, width), torch.randn(5, width + 3).to(dtype)
    weights, spaced_gate, out = torch.randn(width), spaced(gate), spaced(torch.zeros(5, width).to(dtype))
    given = rows.clone()
    operations = OperationList(1)
    fields = {"number": 1e-5, "groups": groups, "flags": NORM_LAST if is_last else 0, "cap": 0.7}
    operations.add(
        OperationKind.GATED_NORM,
        into=given,
        out=out,
        extra=spaced_gate.data_ptr(),
        more=weights,
        n=width + 3,
        k=width,
        **fields,
    )
    assert operations.run(kernels, StepArguments(tokens=5), dtype)
    gates = torch.nn.functional.silu(0.7 * gate[:, :width].double())
    parts = (rows * gates if is_last else rows.double()).unflatten(1, (groups, -1))
    normed = (parts * (parts.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(1) * weights
    right = normed if is_last else normed * gates
    assert torch.allclose(
        out[:5, :width].double(), right, rtol=1e-5 if dtype == torch.float32 else 5e-3, atol=1e-6
    )
