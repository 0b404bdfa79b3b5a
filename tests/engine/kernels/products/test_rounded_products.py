"""Activations in 8 bits: sums are exact, and the same with any kernels and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kernels.core import library
from engine.kernels.core.operations import ADD, AS_FLOAT, OperationKind, OperationList, StepArguments
from engine.kernels.core.rows import SLACK, bytes_pitch, pitch_of, spaced
from engine.kernels.experts.packed_experts import NativeExperts
from engine.kernels.make import make_program
from engine.kernels.products.packing import Packer, add_rounding
from engine.kernels.products.quantized import EightBitPanels
from engine.model.quantization.attached import ATTRIBUTE
from engine.model.quantization.rounding import Rounding, integer_product
from engine.model.quantization.weight_codes import Codes
from tests.engine.kernels.emulation import TILES, VNNI
from tests.engine.kernels.products.test_compression import same_bits
from tests.engine.kernels.test_kernels import experts, random
from tests.engine.model.quantization.writers import write_quantized
from tests.engine.model.test_weights import load
from tests.engine.tiny_models import make_tiny_model

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")
WHOLE = Rounding(scale=1.0)
"""Whole numbers stay what they are."""


@cache
def for_avx2() -> library.KernelLibrary:
    return library.opened("avx2")


@pytest.fixture(params=["tiles", "vectors", "avxvnni", "avx2"])
def kernels(request: pytest.FixtureRequest) -> Iterator[library.KernelLibrary]:
    """AMX and AVX-VNNI, emulated where the CPU has none; AVX-512; AVX2."""
    assert KERNELS is not None
    if request.param == "avx2":
        yield for_avx2()
        return
    if request.param == "avxvnni":
        with VNNI.kernels() as found:
            yield found
        return
    had = KERNELS.has_tiles
    with ExitStack() as stack:
        found = KERNELS
        if request.param == "tiles" and not had:
            if not TILES.is_possible:
                pytest.skip("no AVX-512 here, by which AMX is emulated")
            found = stack.enter_context(TILES.kernels())
        found.use_tiles(request.param == "tiles")
        yield found
        found.use_tiles(had)


class Known:
    """Reader of codes that are there."""

    def __init__(self, codes: Codes) -> None:
        self.codes = codes
        self.rounds = codes.rounding is not None

    def read(self) -> Codes:
        return self.codes

    keep = read


def weight_of(
    *shape: int,
    rounding: Rounding = WHOLE,
    scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> torch.nn.Parameter:
    """Random weights [..., outputs, inputs] of 8 bits, all codes among them."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    scales = torch.rand((*shape[:-1], 1), generator=generator) * 0.02 if scale is None else None
    if scales is None:
        scales = torch.full((*shape[:-1], 1), scale)
    known = Codes(codes, scales, None, 8, rounding=rounding)
    weight = torch.nn.Parameter(known.widened(dtype), requires_grad=False)
    setattr(weight, ATTRIBUTE, Known(known))
    return weight


def known_of(weight: torch.nn.Parameter) -> Codes:
    reader: Known = getattr(weight, ATTRIBUTE)
    return reader.codes


def multiply(
    kernels: library.KernelLibrary,
    kind: OperationKind,
    x: torch.Tensor,
    laid: object,
    out: torch.Tensor,
    **fields: object,
) -> None:
    """Round the rows of x, and multiply them."""
    assert isinstance(laid, EightBitPanels)
    rounded = torch.full((len(x) + SLACK, bytes_pitch(x.shape[1])), 77, dtype=torch.uint8)
    operations = OperationList(2)
    into = add_rounding(operations, laid, spaced(x), rounded, x.shape[1])
    operations.add(kind, into=into, out=out, weights=laid, k=x.shape[1], **fields)
    operations.run(kernels, StepArguments(tokens=len(x)), x.dtype)


def products(
    kernels: library.KernelLibrary, x: torch.Tensor, weight: torch.nn.Parameter, parts: int = 1
) -> torch.Tensor:
    laid = Packer(kernels).panels(weight, multiple=32, parts=parts)
    out = torch.empty(len(x), len(weight))
    multiply(kernels, OperationKind.LINEAR, x, laid, out, n=len(weight), b=parts, flags=AS_FLOAT)
    return out


@pytest.mark.parametrize("inputs", [64, 192, 1024, 4864])
@pytest.mark.parametrize("rows", [1, 5, 33, 98])
def test_sums_are_those_of_numpy(kernels: library.KernelLibrary, rows: int, inputs: int) -> None:
    generator = np.random.default_rng(rows + inputs)
    x = generator.integers(-128, 128, (rows, inputs))
    x[0], x[-1, ::2] = -128, 127
    weight = weight_of(250, inputs, scale=1.0)
    codes = known_of(weight).codes
    codes[0], codes[1, ::3] = -128, 127
    weight.data.copy_(known_of(weight).widened(torch.bfloat16))
    expected = x.astype(np.int64) @ codes.numpy().astype(np.int64).T
    assert abs(expected).max() > 2**15, "more than 16 bits"
    found = products(kernels, torch.from_numpy(x).bfloat16(), weight)
    assert np.array_equal(found.numpy(), expected.astype(np.float32))
    assert torch.equal(
        integer_product(torch.from_numpy(x), codes), torch.from_numpy(expected).to(torch.int32)
    )


ROUNDINGS = {
    "each row": Rounding(),
    "each row, not symmetric": Rounding(is_symmetric=False),
    "one scale": Rounding(scale=0.03),
    "one scale and zero": Rounding(scale=0.03, zero=-17),
}


@pytest.mark.parametrize(
    ("parts", "inputs", "dtype"),
    [(1, 192, torch.bfloat16), (2, 128, torch.float32), (4, 896, torch.bfloat16)],
)
@pytest.mark.parametrize("how", ROUNDINGS)
def test_results_have_the_bits_of_torch(
    kernels: library.KernelLibrary, parts: int, inputs: int, how: str, dtype: torch.dtype
) -> None:
    weight = weight_of(250, inputs, rounding=ROUNDINGS[how], dtype=dtype)
    for rows in (1, 40):
        x = random(rows, inputs, dtype=dtype)
        x[0, :5], x[0, 5] = 0, 100.0
        x[-1, : inputs // parts] = 0
        assert same_bits(products(kernels, x, weight, parts), known_of(weight).product(x, parts))


def test_ranks_add_up_what_one_adds(kernels: library.KernelLibrary) -> None:
    """Two ranks have two of four parts each."""
    weight, x = weight_of(96, 512, rounding=Rounding()), random(9, 512, dtype=torch.bfloat16)
    whole, known = products(kernels, x, weight, 4), known_of(weight)
    halves = []
    for half in (slice(0, 256), slice(256, 512)):
        codes = Codes(known.codes[:, half], known.scales, None, 8, rounding=known.rounding)
        part = torch.nn.Parameter(weight.data[:, half].contiguous(), requires_grad=False)
        setattr(part, ATTRIBUTE, Known(codes))
        halves.append(products(kernels, x[:, half].contiguous(), part, 2))
    assert same_bits(whole, halves[0] + halves[1])


@pytest.mark.parametrize("rows", [2, 40])
def test_results_are_added_to_what_is_there(kernels: library.KernelLibrary, rows: int) -> None:
    weight, x = weight_of(250, 128, rounding=Rounding()), random(rows, 128, dtype=torch.bfloat16)
    before, bias = random(rows, 250, dtype=torch.bfloat16), random(250)
    out, laid = spaced(before), Packer(kernels).panels(weight, multiple=32)
    multiply(kernels, OperationKind.LINEAR, x, laid, out, n=250, more=bias, flags=ADD)
    expected = (known_of(weight).product(x) + bias + before.float()).bfloat16()
    assert same_bits(out[:rows, :250].contiguous(), expected)


@pytest.mark.parametrize("rows", [3, 40])
def test_gated_products(kernels: library.KernelLibrary, rows: int) -> None:
    gate, up = (weight_of(176, 128, rounding=Rounding(), seed=seed) for seed in (1, 2))
    x = random(rows, 128, dtype=torch.bfloat16)
    out = torch.zeros(rows, pitch_of(176, torch.bfloat16), dtype=torch.bfloat16)
    multiply(kernels, OperationKind.GATED, x, Packer(kernels).gate_and_up(gate, up), out, n=176)
    inner = torch.nn.functional.silu(known_of(gate).product(x))
    expected = inner * known_of(up).product(x)
    torch.testing.assert_close(out[:, :176].float(), expected, rtol=0.01, atol=1e-4)


def test_experts_round_what_goes_through_them(kernels: library.KernelLibrary) -> None:
    module = experts(5, 64, 128, torch.bfloat16)
    for name, shape in (("gate_up_proj", (5, 2 * 128, 64)), ("down_proj", (5, 64, 128))):
        setattr(module, name, weight_of(*shape, rounding=Rounding()))
    rows, counts = random(98, 64, dtype=torch.bfloat16), [5, 0, 78, 14, 1]
    native = NativeExperts(kernels)
    found = native.compute(module, rows, counts)
    packed = native.packed(module)
    assert isinstance(packed.up, EightBitPanels)
    assert isinstance(packed.down, EightBitPanels)
    assert packed.down.parts == 4
    first, second = known_of(module.gate_up_proj), known_of(module.down_proj)
    for expert, part in enumerate(rows.split(counts)):
        inner = module._apply_gate(first.of(expert).product(part)).bfloat16()
        expected = second.of(expert).product(inner, 4)
        size = expected.norm().clamp(min=1)
        got = found.split(counts)[expert].float()
        assert (got - expected).norm() / size < 0.01


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_model_for_activations_in_8_bits_is_computed_so(family: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "plain", family, dtype=torch.bfloat16)
    write_quantized(source, "w8a8 per channel", tmp_path / "quantized", tmp_path / "wide")
    program = make_program(load(tmp_path / "quantized"), 16)
    assert program is not None, "torch computes the same"
    assert program.quantized_bytes > 0
