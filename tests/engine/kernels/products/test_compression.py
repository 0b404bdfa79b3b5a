"""Weights in 12 bits: products have the same bits as with the original weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.kernels.core import library
from engine.kernels.core.operations import ADD, AS_FLOAT, OperationKind, OperationList, StepArguments
from engine.kernels.core.pages import Arena
from engine.kernels.core.rows import pitch_of, spaced
from engine.kernels.experts.packed_experts import NativeExperts
from engine.kernels.products.compression import (
    OFF,
    TILE_BYTES,
    TILE_WEIGHTS,
    Compressed,
    Survey,
    can_compress,
    compressed,
)
from engine.kernels.products.packing import Packer, gate_and_up, panels
from tests.engine.kernels.emulation import TILES
from tests.engine.kernels.test_kernels import experts, random

KERNELS = library.load()
pytestmark = pytest.mark.skipif(
    KERNELS is None or not KERNELS.compresses, reason="no AVX-512 with VBMI, or no C++ compiler, here"
)


@pytest.fixture(params=["tiles", "vectors"])
def kernels(request: pytest.FixtureRequest) -> Iterator[library.KernelLibrary]:
    """With AMX, emulated where the CPU has none, and without."""
    assert KERNELS is not None
    had = KERNELS.has_tiles
    if request.param == "tiles" and not had:
        if not TILES.is_possible:
            pytest.skip("no AVX-512 here, by which AMX is emulated")
        with TILES.kernels() as kernels:
            yield kernels
        return
    KERNELS.use_tiles(request.param == "tiles")
    yield KERNELS
    KERNELS.use_tiles(had)


def weights(outputs: int, inputs: int) -> torch.Tensor:
    """As a model's, and some that no model has."""
    weight = random(outputs, inputs, dtype=torch.bfloat16) * 0.02
    odd = torch.tensor([0.0, -0.0, 1e-40, -1e-30, 3e38, -3.0, float("inf"), float("nan")])
    weight[::9, 3] = odd[torch.arange(len(weight[::9])) % len(odd)].bfloat16()
    weight[1] = 0
    return weight


def narrow(kernels: library.KernelLibrary, words: torch.Tensor) -> Compressed:
    """However many patches that takes."""
    tiles = torch.zeros(words.numel() // TILE_WEIGHTS, TILE_BYTES, dtype=torch.uint8)
    return Compressed(kernels, words, tiles, Survey(kernels, words))


def run(
    kernels: library.KernelLibrary, kind: OperationKind, x: torch.Tensor, out: torch.Tensor, **fields: object
) -> None:
    operations = OperationList(1)
    operations.add(kind, into=spaced(x), out=out, **fields)
    operations.run(kernels, StepArguments(tokens=len(x)), x.dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    as_int = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.view(as_int), other.view(as_int))


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 75, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(320, 64), (250, 192), (64, 1024)])
def test_products_have_the_same_bits(
    kernels: library.KernelLibrary, rows: int, outputs: int, inputs: int
) -> None:
    x, words = random(rows, inputs, dtype=torch.bfloat16), panels(weights(outputs, inputs), 32)
    before = random(rows, outputs, dtype=torch.bfloat16)
    wide = [torch.empty(rows, outputs) for _ in range(2)]
    added = [spaced(before) for _ in range(2)]
    for number, form in enumerate((words, narrow(kernels, words))):
        shape = {"weights": form, "n": outputs, "k": inputs}
        run(kernels, OperationKind.LINEAR, x, wide[number], flags=AS_FLOAT, **shape)
        run(kernels, OperationKind.LINEAR, x, added[number], flags=ADD, **shape)
    assert same_bits(*wide)
    assert same_bits(*added)


@pytest.mark.parametrize("rows", [3, 40])
def test_gated_products_have_the_same_bits(kernels: library.KernelLibrary, rows: int) -> None:
    x, words = random(rows, 128, dtype=torch.bfloat16), gate_and_up(weights(2 * 176, 128))
    outs = [torch.zeros(rows, pitch_of(176, torch.bfloat16), dtype=torch.bfloat16) for _ in range(2)]
    for out, form in zip(outs, (words, narrow(kernels, words)), strict=True):
        run(kernels, OperationKind.GATED, x, out, weights=form, n=176, k=128)
    assert same_bits(*outs)


def test_experts_have_the_same_bits(kernels: library.KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    module = experts(5, 64, 96, torch.bfloat16, size=0.02)
    rows, counts = random(98, 64, dtype=torch.bfloat16), [5, 0, 78, 14, 1]
    found = NativeExperts(kernels).compute(module, rows, counts)
    monkeypatch.setenv(OFF, "0")
    assert same_bits(found, NativeExperts(kernels).compute(module, rows, counts))


def test_a_quarter_less(kernels: library.KernelLibrary) -> None:
    words = panels(random(512, 1024, dtype=torch.bfloat16) * 0.02)
    found = narrow(kernels, words)
    assert 0.75 < found.num_bytes / words.nbytes < 0.76
    laid = Packer(kernels).panels(random(512, 1024, dtype=torch.bfloat16))
    assert isinstance(laid, Compressed if kernels.has_tiles else torch.Tensor)


def test_what_is_not_compressed(kernels: library.KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = torch.arange(64 * 64, dtype=torch.int16).mul(16).view(torch.bfloat16).view(64, 64)
    assert compressed(kernels, panels(apart), Arena()) is None, "every upper byte is as frequent as any other"
    assert isinstance(Packer(kernels).panels(apart), torch.Tensor)
    assert not can_compress(kernels, (4, 24, 16, 2), torch.bfloat16), "no whole tiles"
    assert not can_compress(kernels, (4, 32, 16, 1), torch.float32)
    assert can_compress(kernels, (4, 32, 16, 2), torch.bfloat16) == kernels.has_tiles
    monkeypatch.setenv(OFF, "0")
    assert not can_compress(kernels, (4, 32, 16, 2), torch.bfloat16)
