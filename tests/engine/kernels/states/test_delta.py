"""Gated delta rules by rows against float64, and their bits however a context is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from engine.kernels.cache.native_states import NativeStates
from engine.kernels.cache.state_shape import StateShape
from engine.kernels.core import library
from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.operations import OperationKind, OperationList, StepArguments
from engine.kernels.core.rows import pitch_of, spaced
from engine.kernels.products.activations import ActivationKind
from engine.kernels.states.delta_layer import DeltaSizes, delta_layer
from engine.states.grid import NATIVE_GRID
from engine.states.held import StateRows
from engine.step import RowPieces

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")


class Kind(NamedTuple):
    """A kind of layer with a gated delta rule."""

    sizes: DeltaSizes
    by_channel: bool = False
    bound: float = 0.0
    step_factor: float = 1.0
    gate: ActivationKind = ActivationKind.SILU


KINDS = [
    Kind(DeltaSizes(heads=4, key_heads=2, key_dim=128, value_dim=128)),
    Kind(DeltaSizes(heads=3, key_heads=1, key_dim=96, value_dim=192), step_factor=2.0),
    Kind(DeltaSizes(heads=1, key_heads=1, key_dim=16, value_dim=16)),
    Kind(DeltaSizes(heads=2, key_heads=2, key_dim=256, value_dim=256)),
    Kind(DeltaSizes(2, 2, 64, 64), by_channel=True, gate=ActivationKind.SIGMOID),
    Kind(DeltaSizes(2, 2, 32, 48), by_channel=True, bound=-5.0, gate=ActivationKind.SIGMOID),
]
TOKENS = 150
MOST_REQUESTS = 5
SLOTS_EACH = TOKENS // NATIVE_GRID + 1
"""Slots of a request, one for each boundary."""
EPS = 1e-6


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


def drawn(numbers: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(numbers.standard_normal(shape, dtype=np.float32))


class Context:
    """Made-up inputs of one layer for a context: [tokens, ...] each."""

    def __init__(self, kind: Kind, dtype: torch.dtype, seed: int) -> None:
        sizes, numbers = kind.sizes, np.random.default_rng(seed)
        each = sizes.key_dim if kind.by_channel else 1
        widths = sizes.mixed, sizes.heads * each, sizes.heads, sizes.values
        self.given = [drawn(numbers, TOKENS, width).to(dtype) for width in widths]


class Layer:
    """One layer of which nothing but the rule is computed; requests lie in slots."""

    def __init__(self, kind: Kind, dtype: torch.dtype, kernels: KernelLibrary | None = None) -> None:
        self.kind, self.dtype, sizes = kind, dtype, kind.sizes
        found = kernels or library.load()
        assert found is not None
        self._library = found
        kept = sizes.kept(by_channel=kind.by_channel)
        shape = StateShape(4, sizes.mixed, sizes.heads, sizes.key_dim, sizes.value_dim, head_floats=kept)
        self.states = NativeStates([shape], dtype)
        self.states.allocate(MOST_REQUESTS * SLOTS_EACH)
        assert self.states.pool is not None
        for tensor in self.states.pool.layers[0]:
            assert tensor is not None
            tensor.fill_(float("nan"))  # what an earlier owner left
        numbers = np.random.default_rng(0)
        each = sizes.key_dim if kind.by_channel else 1
        self.rates = -drawn(numbers, sizes.heads).exp()
        self.shifts = drawn(numbers, sizes.heads * each) - 1
        self.norm = 1 + 0.2 * drawn(numbers, sizes.value_dim)

    def run(self, rows: Sequence[tuple[int, int, Context, int]]) -> list[torch.Tensor]:
        """Results [count, values] of rows (request, start, its inputs, count) of one step."""
        sizes, pieces = self.kind.sizes, {}
        for index, (request, start, _, count) in enumerate(rows):
            last = (start + count) // NATIVE_GRID * NATIVE_GRID
            if last > start // NATIVE_GRID * NATIVE_GRID:
                pieces[index] = RowPieces(fills={last: [request * SLOTS_EACH + last // NATIVE_GRID]})
        slots, starts, _, counts = zip(*rows, strict=True)
        mixed, decays, steps, gates = (
            spaced(torch.cat([each.given[number][start : start + count] for _, start, each, count in rows]))
            for number in range(4)
        )
        out = torch.full((sum(counts), pitch_of(sizes.values, self.dtype)), float("nan"), dtype=self.dtype)
        record = delta_layer(
            sizes,
            **self._addresses({"mixed": mixed, "decays": decays, "steps": steps, "gates": gates}),
            by_channel=self.kind.by_channel,
            rates=self.rates.data_ptr(),
            shifts=self.shifts.data_ptr(),
            norm=self.norm.data_ptr(),
            bound=self.kind.bound,
            step_factor=self.kind.step_factor,
            eps=EPS,
            gate_kind=self.kind.gate,
        )
        operations = OperationList(1)
        operations.add(OperationKind.DELTA_ROWS, out=out, more=record, extra=self.states.records[0])
        with self.states.step(StateRows(slots, starts, counts, pieces)):
            arguments = StepArguments(
                tokens=len(out),
                starts=np.array(starts),
                counts=np.array(counts),
                offsets=np.cumsum([0, *counts[:-1]]),
                **self.states.arguments(),
            )
            assert operations.run(self._library, arguments, self.dtype)
        return list(out[:, : sizes.values].split(list(counts)))

    @staticmethod
    def _addresses(rows: dict[str, torch.Tensor]) -> dict[str, int]:
        places = {name: each.data_ptr() for name, each in rows.items()}
        return places | {f"{name}_pitch": each.shape[1] for name, each in rows.items()}

    def whole(self, context: Context) -> torch.Tensor:
        """Results of a context in one row, by a layer of its own."""
        return Layer(self.kind, self.dtype, self._library).run([(0, 0, context, TOKENS)])[0]


class Parts(NamedTuple):
    """What the rule is given of a context, by head."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    steps: torch.Tensor


def parts_of(layer: Layer, context: Context, kind: torch.dtype) -> Parts:
    (heads, key_heads, key_dim, value_dim), own = layer.kind.sizes, layer.kind
    mixed, decays, steps, _ = (each.to(kind) for each in context.given)
    queries, keys, values = mixed.split([key_heads * key_dim] * 2 + [heads * value_dim], dim=1)
    queries, keys = (
        each.view(TOKENS, key_heads, key_dim).repeat_interleave(heads // key_heads, 1)
        for each in (queries, keys)
    )
    shifted = (decays + layer.shifts).view(TOKENS, heads, -1)
    rates = layer.rates.to(kind)[:, None]
    logs = own.bound * torch.sigmoid(-rates * shifted) if own.bound else rates * F.softplus(shifted)
    return Parts(
        queries, keys, values.view(TOKENS, heads, value_dim), logs, steps.sigmoid() * own.step_factor
    )


def finished(layer: Layer, context: Context, results: torch.Tensor) -> torch.Tensor:
    """Results [tokens, heads, value_dim] behind the norm and the gates."""
    gates = context.given[3].to(results.dtype).view(results.shape)
    opened = gates.sigmoid() if layer.kind.gate == ActivationKind.SIGMOID else F.silu(gates)
    normed = results * (results.square().mean(-1, keepdim=True) + EPS).rsqrt() * layer.norm
    return (normed * opened).flatten(1)


def expected(layer: Layer, context: Context) -> torch.Tensor:
    """Results token by token in float64."""
    queries, keys, values, decays, steps = parts_of(layer, context, torch.float64)
    queries, keys = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (queries, keys))
    heads, _, key_dim, value_dim = layer.kind.sizes
    state, rows = torch.zeros(heads, key_dim, value_dim, dtype=torch.float64), []
    for token in range(TOKENS):
        state = state * decays[token].exp()[..., None]
        key = keys[token][..., None]
        missing = values[token][:, None] - (key * state).sum(1, keepdim=True)
        state = state + key * missing * steps[token][:, None, None]
        rows.append((queries[token][..., None] * state).sum(1) * key_dim**-0.5)
    return finished(layer, context, torch.stack(rows))


def librarys(layer: Layer, context: Context) -> torch.Tensor:
    """Results of transformers' own function in float32."""
    parts = [each[None] for each in parts_of(layer, context, torch.float32)]
    function: Any = chunk_kimi_delta_attention if layer.kind.by_channel else torch_chunk_gated_delta_rule
    decays = parts[3] if layer.kind.by_channel else parts[3][..., 0]
    found = function(*parts[:3], g=decays, beta=parts[4], use_qk_l2norm_in_kernel=True)[0][0]
    return finished(layer, context, found)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers_are_as_near_to_float64_as_the_librarys(kind: Kind, dtype: torch.dtype) -> None:
    layer, context = Layer(kind, dtype), Context(kind, dtype, seed=1)
    found, right = layer.run([(0, 0, context, TOKENS)])[0].double(), expected(layer, context)
    rounding = (right.to(dtype).double() - right).norm()
    others = (librarys(layer, context).double() - right).norm()
    assert (found - right).norm() < 2 * others + 1.01 * rounding + 1e-7 * right.norm()


@pytest.mark.parametrize("avx2", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bits_do_not_depend_on_how_a_context_is_cut(kind: Kind, avx2: bool, dtype: torch.dtype) -> None:
    kernels = library.opened("avx2" if avx2 else None)
    for cut in ([1] * TOKENS, [7] * 30, [16] * 10, [50] * 3, [64] * 3, [3, 1, 20, 40, 1, 1, 14, 70]):
        layer, context = Layer(kind, dtype, kernels), Context(kind, dtype, seed=2)
        at, rows = 0, []
        for count in cut:
            some = min(count, TOKENS - at)
            rows += layer.run([(0, at, context, some)]) if some else []
            at += some
        assert torch.equal(torch.cat(rows), layer.whole(context)), cut


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4]], ids=str)
def test_rows_in_company_with_drafts_and_steps_again_have_the_bits_alone(
    kind: Kind, threads: int, dtype: torch.dtype
) -> None:
    torch.set_num_threads(threads)
    layer, numbers = Layer(kind, dtype), random.Random(4)
    contexts = [Context(kind, dtype, seed) for seed in range(MOST_REQUESTS)]
    refused = Context(kind, dtype, seed=99)
    at = [0] * len(contexts)
    found: list[list[torch.Tensor]] = [[] for _ in contexts]
    while any(each < TOKENS for each in at):
        going = [request for request, position in enumerate(at) if position < TOKENS]
        rows = []
        for request in numbers.sample(going, numbers.randint(1, len(going))):
            count = min(numbers.choice([1, 1, 1, 5, 16, 33]), TOKENS - at[request])
            rows.append((request, at[request], contexts[request], count))
        if numbers.random() < 0.4:  # drafts before a boundary, which are refused; or a step that runs again
            drafted = [(r, s, refused, min(3, NATIVE_GRID - 1 - s % NATIVE_GRID)) for r, s, _, _ in rows]
            layer.run([each for each in drafted if each[3] > 0] or rows[:1])
        for (request, _, _, count), result in zip(rows, layer.run(rows), strict=True):
            found[request].append(result)
            at[request] += count
    for context, rows_of_it in zip(contexts, found, strict=True):
        assert torch.equal(torch.cat(rows_of_it), layer.whole(context))


def test_a_strong_decay_forgets_without_overflow(dtype: torch.dtype) -> None:
    """Keys are not divided by decays, which may be too small for a float."""
    kind = KINDS[4]
    layer, context = Layer(kind, dtype), Context(kind, dtype, seed=3)
    layer.rates *= 40
    found, right = layer.run([(0, 0, context, TOKENS)])[0].double(), expected(layer, context)
    assert (found - right).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * right.norm()
