"""Weights kept as codes: products have the same bits as with the widened weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.kernels.core import library
from engine.kernels.core.operations import ADD, AS_FLOAT, OperationKind
from engine.kernels.core.rows import pitch_of, spaced
from engine.kernels.experts.packed_experts import NativeExperts
from engine.kernels.make import make_program
from engine.kernels.products.packing import Packer
from engine.kernels.products.quantized import CodeArithmetic, QuantizedPanels
from engine.model.quantization.attached import ATTRIBUTE
from engine.model.quantization.making import quantize_checkpoint
from engine.model.quantization.stacks import TWICE
from engine.model.quantization.weight_codes import Codes
from engine.model.weight_files import open_weights
from tests.engine.kernels.emulation import TILES
from tests.engine.kernels.products.test_compression import run, same_bits
from tests.engine.kernels.test_kernels import experts, random
from tests.engine.model.quantization.writers import write_quantized
from tests.engine.model.test_weights import load
from tests.engine.tiny_models import make_tiny_model

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")


@pytest.fixture(params=["tiles", "vectors", "avx2"])
def kernels(request: pytest.FixtureRequest) -> Iterator[library.KernelLibrary]:
    """With AMX, emulated where the CPU has none, and without; and those for AVX2."""
    assert KERNELS is not None
    if request.param == "avx2":
        yield library.opened("avx2")
        return
    had = KERNELS.has_tiles
    if request.param == "tiles" and not had:
        if not TILES.is_possible:
            pytest.skip("no AVX-512 here, by which AMX is emulated")
        with TILES.kernels() as emulated:
            yield emulated
        return
    KERNELS.use_tiles(request.param == "tiles")
    yield KERNELS
    KERNELS.use_tiles(had)


class Known:
    """Reader of codes that are there."""

    def __init__(self, codes: Codes) -> None:
        self.codes = codes

    def read(self) -> Codes:
        return self.codes


def quantised(
    *shape: int,
    bits: int,
    group: int,
    zeros: bool = False,
    is_float: bool = False,
    has_order: bool = False,
    scale_bits: int = 24,
    size: float = 0.02,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.nn.Parameter:
    """Random weights [..., outputs, inputs] that know their codes.

    ``scale_bits``: significant bits of scales, the largest of which is ``size``.
    """
    generator = torch.Generator().manual_seed(sum(shape) + bits)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(low, high, shape, generator=generator).to(torch.int8)
    grid = (*shape[:-1], shape[-1] // group)
    scales = torch.rand(grid, generator=generator) * size
    scales = (scales.view(torch.int32) & -(1 << (24 - scale_bits))).view(torch.float32)
    points = torch.randint(low, high, grid, generator=generator).float() if zeros else None
    if is_float and bits == 8:
        codes[(codes & 127) == 127] = 1  # those are no numbers
    elif is_float:
        codes = TWICE[codes.int() + 8]
    order = torch.randint(0, grid[-1], (*shape[:-2], shape[-1]), generator=generator).int()
    known = Codes(codes, scales, points, bits, is_float, order=order if has_order else None)
    weight = torch.nn.Parameter(known.widened(dtype), requires_grad=False)
    setattr(weight, ATTRIBUTE, Known(known))
    return weight


ROUNDED = {
    "int4, ties": ({"bits": 4, "group": 32, "scale_bits": 8}, CodeArithmetic.BY_FLOATS),
    "int4 with zeros, ties": (
        {"bits": 4, "group": 32, "scale_bits": 11, "zeros": True},
        CodeArithmetic.BY_FLOATS,
    ),
    "int8, ties": ({"bits": 8, "group": 64, "scale_bits": 8}, CodeArithmetic.BY_FLOATS),
    "int8 with zeros, ties": (
        {"bits": 8, "group": 64, "scale_bits": 8, "zeros": True},
        CodeArithmetic.BY_FLOATS,
    ),
    "fp8, ties": ({"bits": 8, "group": 64, "scale_bits": 8, "is_float": True}, CodeArithmetic.BY_FLOATS),
    "int4, nothing to round": ({"bits": 4, "group": 32, "scale_bits": 5}, CodeArithmetic.EXACT),
    "mxfp4, nothing to round": (
        {"bits": 4, "group": 32, "scale_bits": 1, "is_float": True},
        CodeArithmetic.EXACT,
    ),
    "int4, small": ({"bits": 4, "group": 32, "size": 1e-30}, CodeArithmetic.ANY),
    "int8, large": ({"bits": 8, "group": 64, "size": 1e36}, CodeArithmetic.ANY),
    "int4 with zeros of all bits": ({"bits": 4, "group": 32, "zeros": True}, CodeArithmetic.ANY),
}
"""Forms by how their weights are rounded, and what AVX2 may do."""


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rounding_of_weights_has_the_same_bits(kernels: library.KernelLibrary, rows: int, form: str) -> None:
    """Rows are units, so that each weight is seen alone."""
    fields, arithmetic = ROUNDED[form]
    weight = quantised(64, 192, **fields)  # type: ignore[arg-type]
    packer = Packer(kernels)
    codes, plain = packer.panels(weight, multiple=32), packer.panels(weight.data, multiple=32)
    assert isinstance(codes, QuantizedPanels)
    assert codes.record[-1] == arithmetic
    for begin in range(0, 192, rows):
        x = torch.eye(192, dtype=torch.bfloat16)[begin : begin + rows]
        outs = [torch.empty(len(x), 64) for _ in range(2)]
        for out, laid in zip(outs, (codes, plain), strict=True):
            run(kernels, OperationKind.LINEAR, x, out, flags=AS_FLOAT, weights=laid, n=64, k=192)
        assert torch.equal(*outs)


@pytest.mark.parametrize("is_made", [False, True], ids=["while it is read", "as a copy"])
def test_chosen_scales_of_4_bits_leave_nothing_to_round(is_made: bool, tmp_path: Path) -> None:
    """With ``--quantization int4``, and in the copies that Lockstep makes."""
    assert KERNELS is not None
    plain = make_tiny_model(tmp_path / "plain", "llama", dtype=torch.bfloat16)
    if is_made:
        quantize_checkpoint(plain, made := tmp_path / "made", "int4")
    with open_weights(made if is_made else plain, torch.bfloat16, None if is_made else "int4") as (files,):
        known = files.get_slice("model.layers.1.mlp.up_proj.weight")
        codes = known.read_codes(*(slice(0, size) for size in known.get_shape()))
    weight = torch.nn.Parameter(codes.widened(torch.bfloat16), requires_grad=False)
    setattr(weight, ATTRIBUTE, Known(codes))
    laid = Packer(KERNELS).panels(weight)
    assert isinstance(laid, QuantizedPanels)
    assert laid.record[-1] == CodeArithmetic.EXACT


FORMS = {
    "int4": {"bits": 4, "group": 32},
    "int4 with zeros": {"bits": 4, "group": 16, "zeros": True},
    "int8 per channel": {"bits": 8, "group": 192},
    "int8 with zeros": {"bits": 8, "group": 64, "zeros": True},
    "fp8 in blocks": {"bits": 8, "group": 64, "is_float": True},
    "mxfp4": {"bits": 4, "group": 32, "is_float": True},
    "int4 in another order": {"bits": 4, "group": 32, "has_order": True},
    "int4 with zeros in another order": {"bits": 4, "group": 16, "zeros": True, "has_order": True},
    "int8 in another order": {"bits": 8, "group": 64, "zeros": True, "has_order": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5, 9, 14, 33, 230])
@pytest.mark.parametrize("outputs", [64, 250])
def test_products_have_the_same_bits(
    kernels: library.KernelLibrary, rows: int, outputs: int, form: str, dtype: torch.dtype
) -> None:
    weight = quantised(outputs, 192, **FORMS[form], dtype=dtype)  # type: ignore[arg-type]
    packer = Packer(kernels)
    codes, plain = packer.panels(weight, multiple=32), packer.panels(weight.data, multiple=32)
    assert isinstance(codes, QuantizedPanels)
    assert codes.num_bytes < 0.75 * outputs * 192 * dtype.itemsize + 20_000
    x, before = random(rows, 192, dtype=dtype), random(rows, outputs, dtype=dtype)
    wide = [torch.empty(rows, outputs) for _ in range(2)]
    added = [spaced(before) for _ in range(2)]
    for number, laid in enumerate((codes, plain)):
        shape = {"weights": laid, "n": outputs, "k": 192}
        run(kernels, OperationKind.LINEAR, x, wide[number], flags=AS_FLOAT, **shape)
        run(kernels, OperationKind.LINEAR, x, added[number], flags=ADD, **shape)
    assert same_bits(*wide)
    assert same_bits(*added)


@pytest.mark.parametrize("rows", [3, 40])
def test_gated_products_have_the_same_bits(kernels: library.KernelLibrary, rows: int) -> None:
    x = random(rows, 128, dtype=torch.bfloat16)
    gate, up = quantised(176, 128, bits=4, group=32), quantised(176, 128, bits=4, group=32, zeros=True)
    packer = Packer(kernels)
    forms = packer.gate_and_up(gate, up), packer.gate_and_up(gate.data, up.data)
    assert isinstance(forms[0], QuantizedPanels)
    outs = [torch.zeros(rows, pitch_of(176, torch.bfloat16), dtype=torch.bfloat16) for _ in range(2)]
    for out, form in zip(outs, forms, strict=True):
        run(kernels, OperationKind.GATED, x, out, weights=form, n=176, k=128)
    assert same_bits(*outs)


@pytest.mark.parametrize(("bits", "has_order"), [(4, False), (8, False), (4, True)])
def test_experts_have_the_same_bits(kernels: library.KernelLibrary, bits: int, has_order: bool) -> None:
    """Each may have its own order of groups."""
    module, widened = (experts(5, 64, 96, torch.bfloat16) for _ in range(2))
    for name, shape in (("gate_up_proj", (5, 2 * 96, 64)), ("down_proj", (5, 64, 96))):
        setattr(module, name, quantised(*shape, bits=bits, group=32, has_order=has_order))
        getattr(widened, name).data = getattr(module, name).data
    rows, counts = random(98, 64, dtype=torch.bfloat16), [5, 0, 78, 14, 1]
    native = NativeExperts(kernels)
    found = native.compute(module, rows, counts)
    assert isinstance(native.packed(module).up, QuantizedPanels)
    assert same_bits(found, NativeExperts(kernels).compute(widened, rows, counts))


def test_codes_that_do_not_give_the_weights_are_not_used(kernels: library.KernelLibrary) -> None:
    weight = quantised(64, 64, bits=4, group=32)
    weight.data[3, 3] += 1
    assert not isinstance(Packer(kernels).panels(weight), QuantizedPanels)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "w4a16 groups"),
        ("llama", "w4a16 asymmetric"),
        ("llama", "w8a8 per channel"),
        ("llama", "gptq"),
        ("llama", "gptq in another order"),
        ("qwen3_moe", "w4a16 in another order"),
        ("llama", "awq"),
        ("llama", "fp8 per channel"),
        ("llama", "fp8 in blocks"),
        ("qwen3_moe", "w4a16 groups"),
    ],
)
def test_a_quantised_model_keeps_its_codes(family: str, kind: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "plain", family, dtype=torch.bfloat16)
    write_quantized(source, kind, tmp_path / "quantized", tmp_path / "wide")
    programs = [make_program(load(tmp_path / each), 16) for each in ("quantized", "wide")]
    assert programs[0] is not None
    assert programs[1] is not None
    assert programs[0].quantized_bytes > 0
    assert programs[0].weight_bytes < 0.75 * programs[1].weight_bytes
