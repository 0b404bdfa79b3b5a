"""Attention of the native kernels against a plain computation, and by its bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

from engine.attention.base import LayerShape, PackedRows
from engine.attention.kv_codes import KVCodes, quantized, widened
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.operations import WITHIN, OperationKind, OperationList, StepArguments
from engine.kernels.core.rows import SLACK, pitch_of
from tests.engine.kernels import emulation

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

DTYPES = [torch.float32, torch.bfloat16]
KINDS = [(kind, dtype) for kind in ("best", "avx2") for dtype in DTYPES]
TILES = pytest.param(
    "amx", torch.bfloat16, marks=pytest.mark.skipif(not emulation.TILES.is_possible, reason="no AVX-512 here")
)
BLOCK_SIZE = 16


class Layer(NamedTuple):
    """A layer's attention."""

    group: int
    dim: int
    value_dim: int
    kv_heads: int = 2
    window: int = 0
    cap: float = 0.0
    has_sinks: bool = False
    has_factors: bool = False
    gap: int = 0
    """Other numbers between queries and keys."""
    shared: int = 0
    """Numbers that all keys of a token begin with."""
    groups: int = 0
    """Tasks of the queries of the KV head; values are the ends of keys then."""

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def apart(self) -> int:
        """Numbers of a key that stay in 16 bits where others are codes."""
        return self.dim - self.value_dim if self.groups else 0

    @property
    def width(self) -> int:
        before = self.heads * self.dim + self.gap
        if self.groups:
            return before + self.dim
        return before + self.shared + self.kv_heads * (self.dim - self.shared + self.value_dim)

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    def sinks(self) -> torch.Tensor | None:
        return torch.linspace(-2, 3, self.heads) if self.has_sinks else None

    def factors(self) -> torch.Tensor | None:
        return 1 + torch.arange(4096).div(100).floor() / 10 if self.has_factors else None


PLAIN = Layer(group=2, dim=64, value_dim=64)
LAYERS = [
    PLAIN,
    Layer(group=1, dim=16, value_dim=16),
    Layer(group=3, dim=128, value_dim=128),
    Layer(group=7, dim=80, value_dim=48),
    Layer(group=1, dim=192, value_dim=128),
    Layer(group=40, dim=32, value_dim=64, kv_heads=1),
    Layer(group=2, dim=64, value_dim=64, window=100),
    Layer(group=4, dim=48, value_dim=48, window=1),
    Layer(group=2, dim=64, value_dim=64, cap=2.0),
    Layer(group=8, dim=64, value_dim=64, has_sinks=True),
    Layer(group=2, dim=64, value_dim=64, has_factors=True),
    Layer(group=2, dim=96, value_dim=32, window=300, cap=5.0, has_sinks=True, has_factors=True),
    Layer(group=1, dim=48, value_dim=32, kv_heads=3, gap=24, shared=16),
    Layer(group=20, dim=96, value_dim=64, kv_heads=1, gap=24, groups=2),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Steps of a few microseconds, which threads would only wait for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def kernels_of(kind: str) -> KernelLibrary:
    """Kernels of this CPU, those for AVX2, or those for AMX, whose tiles are emulated."""
    if kind == "amx":
        with emulation.TILES.kernels() as found:
            return found
    kernels = library.load() if kind == "best" else library.opened("avx2")
    assert kernels is not None
    return kernels


def tokens_of(layer: Layer, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Queries, keys and values [count, width]; scores reach from about -12 to 12."""
    numbers = torch.randn(count, layer.width, generator=torch.Generator().manual_seed(seed))
    numbers[:, : layer.width - layer.kv_heads * layer.value_dim] *= 1.7
    return numbers.to(dtype)


class Sequences:
    """Sequences whose tokens come in steps.

    Each has blocks of its own somewhere in one cache.
    """

    def __init__(
        self,
        layer: Layer,
        tokens: Sequence[torch.Tensor],
        kind: str = "best",
        codes: KVCodes | None = None,
    ) -> None:
        self._layer, self._tokens, self._kernels = layer, tokens, kernels_of(kind)
        self._dtype = tokens[0].dtype
        sizes = layer.kv_heads, layer.dim, layer.value_dim
        shape = LayerShape(*sizes, layer.window or None, apart=layer.apart)
        width = max(map(len, tokens)) // BLOCK_SIZE + 1
        blocks = len(tokens) * width
        self.cache = NativeCache(
            [shape], num_blocks=blocks, block_size=BLOCK_SIZE, dtype=self._dtype, codes=codes
        )
        if codes is not None:
            self.cache.keys[0].fill_(127)
            self.cache.values[0].fill_(127)
        for stored in self._numbers():
            stored.fill_(float("nan"))  # what an earlier owner left
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(5))
        self._tables = order.to(torch.int32).view(len(tokens), width).numpy()
        rows = sum(map(len, tokens)) + SLACK
        self._into = torch.full((rows, pitch_of(layer.width, self._dtype)), float("nan"), dtype=self._dtype)
        self._out = torch.zeros(rows, pitch_of(layer.heads * layer.value_dim, self._dtype), dtype=self._dtype)
        self._done = [0] * len(tokens)
        self.results = [torch.empty(0, layer.heads * layer.value_dim, dtype=self._dtype) for _ in tokens]

    def step(self, counts: Sequence[int]) -> None:
        """So many tokens more of each sequence."""
        rows = [row for row, count in enumerate(counts) if count]
        starts = np.array([self._done[row] for row in rows])
        sizes = np.array([counts[row] for row in rows])
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)])
        packed = PackedRows(starts, sizes, self._tables[rows], positions, int((sizes == 1).sum()))
        given = [self._tokens[row][s : s + n] for row, s, n in zip(rows, starts, sizes, strict=True)]
        found = self._attend(packed, torch.cat(given)).split(sizes.tolist())
        for row, size, result in zip(rows, sizes, found, strict=True):
            self._done[row] += int(size)
            self.results[row] = torch.cat([self.results[row], result])

    def forget(self, row: int, first: int, last: int) -> None:
        """Give blocks of a row to somebody else, who leaves no numbers there."""
        for stored in self._numbers():
            view = stored.view(len(stored) // BLOCK_SIZE, -1)
            view[self._tables[row, first:last].tolist()] = float("nan")

    def blocks(self, row: int) -> list[int]:
        """Blocks of a row, one after the other."""
        return [int(block) for block in self._tables[row]]

    def _numbers(self) -> list[torch.Tensor]:
        """What may be no number: keys and values, or the scales of their codes."""
        (scales,) = self.cache.scales
        return [*self.cache.keys, *self.cache.values] if scales is None else [scales]

    def _attend(self, packed: PackedRows, tokens: torch.Tensor) -> torch.Tensor:
        layer, count = self._layer, len(tokens)
        plan = self.cache.plan(packed, np.arange(count))
        into, out = self._into, self._out
        into[:count, : layer.width] = tokens
        width = layer.heads * layer.value_dim
        shape = {
            "a": layer.heads,
            "c": layer.dim,
            "d": layer.window,
            "n": layer.value_dim,
            "width": layer.width,
            "codes": self.cache.codes,
            "scales": self.cache.scales[0],
            "flags": WITHIN if layer.groups else 0,
        }
        of_keys = {"b": layer.kv_heads, "shared": layer.shared}
        keys, values = self.cache.keys[0], self.cache.values[0]
        operations = OperationList(2)
        operations.add(OperationKind.QKV, into=into, out=values, extra=keys, **of_keys, **shape)
        operations.add(
            OperationKind.ATTEND,
            into=into,
            out=out,
            weights=values,
            extra=keys,
            more=layer.sinks(),
            number=layer.scale,
            cap=layer.cap,
            factors=layer.factors(),
            b=layer.kv_heads * max(1, layer.groups),
            groups=layer.groups,
            **shape,
        )
        step = StepArguments(
            tokens=count,
            num_tasks=len(plan.tasks),
            table_width=plan.tables.shape[1],
            block_size=BLOCK_SIZE,
            slots=plan.slots,
            positions=packed.positions,
            angles=np.zeros(0, dtype=np.int64),
            starts=packed.starts,
            counts=packed.counts,
            offsets=plan.offsets,
            tables=plan.tables,
            tasks=plan.tasks,
            apart=int((packed.counts == 1).all()),
        )
        assert operations.run(self._kernels, step, self._dtype)
        return out[:count, :width].clone()


def split(layer: Layer, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Queries [heads, tokens, dim], keys and values [kv_heads, tokens, ...]."""
    count, own = len(tokens), layer.dim - layer.shared
    query, _, rest = tokens.split(
        [layer.heads * layer.dim, layer.gap, layer.width - layer.heads * layer.dim - layer.gap], dim=1
    )
    if layer.groups:
        key, value = rest[:, None], rest[:, None, layer.dim - layer.value_dim :]
    else:
        sizes = [layer.shared, layer.kv_heads * own, layer.kv_heads * layer.value_dim]
        shared, key, value = rest.split(sizes, dim=1)
        every = shared[:, None].expand(-1, layer.kv_heads, -1)
        key = torch.cat([every, key.reshape(count, layer.kv_heads, own)], dim=2)
        value = value.reshape(count, layer.kv_heads, layer.value_dim)
    return [part.transpose(0, 1) for part in (query.reshape(count, layer.heads, layer.dim), key, value)]


def plainly(layer: Layer, tokens: torch.Tensor, codes: KVCodes | None = None) -> torch.Tensor:
    """The same in float64, one operation after the other.

    With ``codes``: of what is left of keys and values as these.
    """
    query, key, value = split(layer, tokens.double())
    if codes is not None:
        apart, key = key[..., : layer.apart].bfloat16(), key[..., layer.apart :]
        key, value = (widened(*quantized(each, codes), codes, torch.float64) for each in (key, value))
        key = torch.cat([apart, key], dim=-1)
    key, value = (each.repeat_interleave(layer.group, dim=0) for each in (key, value))
    scores = query @ key.transpose(1, 2) * layer.scale
    factors = layer.factors()
    if factors is not None:
        scores *= factors[: len(tokens), None]
    if layer.cap:
        scores = layer.cap * torch.tanh(scores / layer.cap)
    numbers = torch.arange(len(tokens))
    distance = numbers[:, None] - numbers
    scores[:, (distance < 0) | (distance >= (layer.window or len(tokens)))] = float("-inf")
    sinks = layer.sinks()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(tokens), 1)], dim=2)
    weights = scores.softmax(dim=2)[:, :, : len(tokens)]
    return (weights @ value).transpose(0, 1).reshape(len(tokens), -1)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("kind", "dtype"), [*KINDS, TILES])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_results_are_those_of_the_plain_computation(layer: Layer, dtype: torch.dtype, kind: str) -> None:
    tokens = [tokens_of(layer, 600, dtype), tokens_of(layer, 31, dtype, seed=1)]
    sequences = Sequences(layer, tokens, kind)
    sequences.step([530, 30])
    sequences.step([1, 1])
    sequences.step([69, 0])
    for given, found in zip(tokens, sequences.results, strict=True):
        assert error(found, plainly(layer, given)) < (3e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize(("kind", "dtype"), [KINDS[1], KINDS[3], TILES])
@pytest.mark.parametrize("layer", [PLAIN, Layer(group=3, dim=128, value_dim=128)], ids=str)
def test_bfloat16_is_as_close_to_float32_as_torchs(layer: Layer, kind: str, dtype: torch.dtype) -> None:
    tokens = tokens_of(layer, 700, dtype)
    sequences = Sequences(layer, [tokens], kind)
    sequences.step([700])
    query, key, value = (part[None] for part in split(layer, tokens))
    own = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=layer.scale
    )
    expected = plainly(layer, tokens)
    theirs = error(own[0].transpose(0, 1).reshape(700, -1), expected)
    assert error(sequences.results[0], expected) < 1.05 * theirs


@pytest.mark.parametrize(("kind", "dtype"), [*KINDS, TILES])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_bits_do_not_depend_on_how_tokens_come(layer: Layer, dtype: torch.dtype, kind: str) -> None:
    """In one piece, in many, one by one, beside others: sums follow the position."""
    tokens = [tokens_of(layer, length, dtype, seed) for seed, length in enumerate((570, 300, 41))]
    whole = Sequences(layer, tokens[:1], kind)
    whole.step([570])
    pieces = Sequences(layer, tokens, kind)
    for counts in ([64, 7, 0], [200, 0, 1], [1, 250, 0], [1, 1, 40], [240, 40, 0], [3, 1, 0], [61, 1, 0]):
        pieces.step(counts)
    others = [Sequences(layer, tokens[1:], kind) for _ in range(2)]
    others[0].step([300, 41])
    for at in range(300):
        others[1].step([1, int(at < 41)])
    assert torch.equal(pieces.results[0], whole.results[0])
    for other in others:
        assert all(map(torch.equal, pieces.results[1:], other.results))


CODED = [PLAIN, LAYERS[1], LAYERS[3], LAYERS[5], LAYERS[11], LAYERS[-1]]
"""Layers with keys and values as codes: few rows and many, all properties."""


@pytest.mark.diagonal("layer", "codes", columns=2, each=1)
@pytest.mark.parametrize("codes", ["int8", "fp8"])
@pytest.mark.parametrize(("kind", "dtype"), [*KINDS, TILES])
@pytest.mark.parametrize("layer", CODED, ids=str)
def test_codes_are_computed_as_exactly_as_numbers(
    layer: Layer, dtype: torch.dtype, kind: str, codes: KVCodes
) -> None:
    tokens = [tokens_of(layer, 560, dtype), tokens_of(layer, 31, dtype, seed=1)]
    sequences = Sequences(layer, tokens, kind, codes)
    sequences.step([530, 30])
    sequences.step([1, 1])
    sequences.step([29, 0])
    for given, found in zip(tokens, sequences.results, strict=True):
        expected = plainly(layer, given, codes)
        assert error(found, expected) < (3e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.diagonal("layer", "codes", columns=2, each=1)
@pytest.mark.parametrize("codes", ["int8", "fp8"])
@pytest.mark.parametrize(("kind", "dtype"), [*KINDS, TILES])
@pytest.mark.parametrize("layer", CODED, ids=str)
def test_bits_of_codes_do_not_depend_on_how_tokens_come(
    layer: Layer, dtype: torch.dtype, kind: str, codes: KVCodes
) -> None:
    tokens = [tokens_of(layer, length, dtype, seed) for seed, length in enumerate((570, 300, 41))]
    whole = Sequences(layer, tokens, kind, codes)
    whole.step([570, 300, 41])
    pieces = Sequences(layer, tokens, kind, codes)
    for counts in ([64, 7, 0], [200, 0, 1], [1, 250, 0], [1, 1, 40], [240, 40, 0], [3, 1, 0], [61, 1, 0]):
        pieces.step(counts)
    assert all(map(torch.equal, pieces.results, whole.results))
    others = Sequences(layer, tokens[2:], kind, codes)
    for _ in range(41):
        others.step([1])
    assert torch.equal(others.results[0], whole.results[2])


@pytest.mark.parametrize("codes", ["int8", "fp8"])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_codes_are_those_of_torch(kind: str, dtype: torch.dtype, codes: KVCodes) -> None:
    layer = Layer(group=1, dim=48, value_dim=32)
    tokens = tokens_of(layer, 2 * BLOCK_SIZE, dtype)
    tokens[3] = 0
    tokens[4] *= 1e-3  # fp8 has few digits for numbers far below the greatest
    tokens[4, ::7] = 100
    sequences = Sequences(layer, [tokens], kind, codes)
    sequences.step([len(tokens)])
    _, keys, values = split(layer, tokens)
    pack = 4 // dtype.itemsize
    blocks, heads = sequences.blocks(0)[:2], layer.kv_heads
    (scales,) = sequences.cache.scales
    assert scales is not None
    kept_scales = scales.view(-1, heads, 2, BLOCK_SIZE)[blocks].transpose(0, 1)
    kept_keys = sequences.cache.keys[0].view(-1, heads, layer.dim // pack, BLOCK_SIZE, pack)[blocks]
    kept_values = sequences.cache.values[0].view(-1, heads, BLOCK_SIZE // pack, layer.value_dim, pack)[blocks]
    for number, given, kept in (
        (0, keys, kept_keys.permute(1, 0, 3, 2, 4)),
        (1, values, kept_values.permute(1, 0, 2, 4, 3)),
    ):
        expected, expected_scales = quantized(given, codes)
        assert torch.equal(kept.reshape(heads, len(tokens), -1), expected)
        assert torch.equal(kept_scales[:, :, number].reshape(heads, -1), expected_scales)


@pytest.mark.parametrize("codes", ["int8", "fp8"])
@pytest.mark.parametrize(("kind", "dtype"), [*KINDS, TILES])
def test_codes_before_the_window_may_be_anybodys(kind: str, dtype: torch.dtype, codes: KVCodes) -> None:
    layer = Layer(group=2, dim=64, value_dim=64, window=70)
    tokens = tokens_of(layer, 1000, dtype)
    one, other = (Sequences(layer, [tokens], kind, codes) for _ in range(2))
    for count in (700, 1, 60, 1, 200):
        start = len(one.results[0])
        one.forget(0, 0, max(0, start - layer.window + 1) // BLOCK_SIZE)
        for each in (one, other):
            each.step([count])
    assert not one.results[0].isnan().any()
    assert torch.equal(one.results[0], other.results[0])


@pytest.mark.parametrize(("kind", "dtype"), [*KINDS, TILES])
def test_keys_before_the_window_may_be_anybodys(kind: str, dtype: torch.dtype) -> None:
    layer = Layer(group=2, dim=64, value_dim=64, window=270)
    tokens = tokens_of(layer, 1400, dtype)
    one, other = (Sequences(layer, [tokens], kind) for _ in range(2))
    for count in (700, 1, 60, 1, 600):
        start = len(one.results[0])
        one.forget(0, 0, max(0, start - layer.window + 1) // BLOCK_SIZE)
        for each in (one, other):
            each.step([count])
    assert not one.results[0].isnan().any()
    assert torch.equal(one.results[0], other.results[0])


@pytest.mark.parametrize(("kv_heads", "threads", "most"), [(1, 1, 48), (4, 1, 96), (4, 2, 96), (1, 8, 12)])
def test_threads_share_a_prompt_in_tasks_that_get_shorter(kv_heads: int, threads: int, most: int) -> None:
    torch.set_num_threads(threads)
    cache = NativeCache(
        [LayerShape(kv_heads, 64, 64, None)], num_blocks=64, block_size=BLOCK_SIZE, dtype=torch.bfloat16
    )
    starts, counts = np.array([700, 0, 50]), np.array([1, 500, 100])
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    packed = PackedRows(starts, counts, np.zeros((3, 64), dtype=np.int32), positions, 1)
    tasks = cache.plan(packed, np.arange(601)).tasks
    rows, first, queries, place = tasks.T
    assert queries.max() == most
    work = queries * (starts[rows] + first + queries)
    assert (np.diff(work) <= 0).all()
    covered = np.concatenate([np.arange(at, at + some) for at, some in zip(place, queries, strict=True)])
    assert sorted(covered.tolist()) == list(range(601))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", [1, 64, 512, 2048])
def test_bits_of_a_long_prompt_do_not_depend_on_its_pieces(piece: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    tokens = tokens_of(PLAIN, 4000, dtype)
    whole, cut = (Sequences(PLAIN, [tokens]) for _ in range(2))
    whole.step([4000])
    for start in range(0, 4000, piece):
        cut.step([min(piece, 4000 - start)])
    assert torch.equal(whole.results[0], cut.results[0])
