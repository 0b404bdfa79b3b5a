"""Products of quantised weights on a GPU, in Triton's interpreter, and whole models with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import ModelConfig
from engine.gpu import coded_products, grouped_experts, product_choice
from engine.gpu.coded_parameter import coded_of
from engine.gpu.coded_products import DeviceCodes, round_rows
from engine.gpu.grouped_products import Pairs
from engine.model import weights
from engine.model.checkpoint import read_model_info
from engine.model.coded_layers import keep_weights_packed, widen_again
from engine.model.expert_weights import expert_modules
from engine.model.quantization.device_codes import device_codes
from engine.model.quantization.rounding import Rounding
from engine.model.quantization.stacks import TWICE
from engine.model.quantization.weight_codes import Codes
from tests.engine.model.quantization.writers import KINDS, MXFP4, write_quantized
from tests.engine.tiny_models import make_tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {FP32: 1e-5, BF16: 1e-2, FP16: 2e-3}
SHAPES = [(40, 96, 1), (70, 64, 2), (33, 80, 1), (24, 256, 2), (24, 96, 6), (16, 80, 5), (20, 1024, 8)]
"""Outputs, inputs, groups."""
ROUNDINGS = [Rounding(), Rounding(is_symmetric=False), Rounding(0.02, 3), Rounding(0.03)]


def codes(kind: str, *shape: int, groups: int, zeros: bool = False) -> Codes:
    """Random ones [..., outputs, inputs]."""
    numbers = torch.Generator().manual_seed(sum(shape))
    is_float = kind.startswith("float")
    if kind == "int8":
        found = torch.randint(-128, 128, shape, generator=numbers, dtype=torch.int8)
    elif kind == "int4":
        found = torch.randint(-8, 8, shape, generator=numbers, dtype=torch.int8)
    elif kind == "float8":
        every = torch.randint(0, 256, shape, generator=numbers, dtype=torch.uint8)  # with the smallest ones
        found = torch.where(every % 128 == 127, 0, every).to(torch.uint8).view(torch.int8)
    else:
        found = TWICE[torch.randint(0, 16, shape, generator=numbers)]
    factors = (*shape[:-1], groups)
    scales = torch.rand(factors, generator=numbers) * 0.02 + 0.001
    points = torch.randint(-5, 5, factors, generator=numbers).float() if zeros else None
    return Codes(found, scales, points, int(kind[-1]), is_float=is_float)


def on_device(known: Codes, parts: int = 1) -> DeviceCodes:
    found = device_codes(known, DEVICE, parts)
    assert found is not None
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().double() - expected.cpu().double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("kind", ["int8", "int4", "float8", "float4"])
def test_products_equal_those_of_widened_weights(kind: str, dtype: torch.dtype) -> None:
    """All kinds of codes, groups and edges, with and without zero points."""
    numbers = torch.Generator().manual_seed(1)
    for outputs, inputs, groups in SHAPES:
        for zeros in (False, True) if kind.startswith("int") else (False,):
            known = codes(kind, outputs, inputs, groups=groups, zeros=zeros)
            held = on_device(known)
            assert torch.equal(held.widened(0, FP32).cpu(), known.widened(FP32))
            for count in (1, 5) if outputs > 24 else (1, 50, 130):  # the last widened as a whole
                rows = torch.randn(2, count, inputs, generator=numbers).to(dtype)
                bias = torch.randn(outputs, generator=numbers).to(dtype)
                expected = rows.float() @ known.widened(FP32).T + bias.float()
                found = held.product(rows.to(DEVICE), bias.to(DEVICE))
                assert found.dtype == dtype
                assert found.shape == (2, count, outputs)
                assert relative(found, expected) < TOLERANCE[dtype], (outputs, inputs, groups, zeros, count)


def test_codes_take_the_bytes_of_their_bits() -> None:
    for kind, each in (("int8", 1.0), ("float8", 1.0), ("int4", 0.5), ("float4", 0.5)):
        held = on_device(codes(kind, 64, 256, groups=4))
        assert held.codes.nbytes == 64 * 256 * each
        assert held.nbytes == held.codes.nbytes + 64 * 4 * 4
        assert held.numel == 64 * 256


def test_groups_in_another_order() -> None:
    """Inputs stand in the order of their groups, and rows follow them.

    Unequal groups are not read.
    """
    known = codes("int4", 24, 96, groups=3)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(2)) % 3
    mixed = Codes(known.codes, known.scales, None, 4, order=order.int())
    rows = torch.randn(5, 96)
    found = on_device(mixed).product(rows.to(DEVICE))
    assert relative(found, rows @ mixed.widened(FP32).T) < 1e-5
    assert torch.equal(on_device(mixed).widened(0, FP32).cpu(), mixed.widened(FP32))
    order[order == 2] = 1
    assert device_codes(Codes(known.codes, known.scales, None, 4, order=order.int()), DEVICE) is None
    stack = codes("int4", 2, 24, 96, groups=3)
    both = torch.stack([torch.arange(96) % 3] * 2).int()
    assert device_codes(Codes(stack.codes, stack.scales, None, 4, order=both), DEVICE) is None


def test_groups_that_cut_a_tile_are_not_read() -> None:
    """Such as the blocks of 20 that tests of DeepSeek's fp8 have."""
    assert device_codes(codes("int8", 24, 72, groups=3), DEVICE) is None
    assert device_codes(codes("float8", 24, 80, groups=4), DEVICE) is None


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_whole_numbers_give_the_bits_of_torch(rounding: Rounding, parts: int) -> None:
    """Rows of all sizes, one of zeros; halves are rounded to even numbers."""
    numbers = torch.Generator().manual_seed(3)
    known = codes("int8", 40, 256, groups=1)
    known = Codes(known.codes, known.scales, None, 8, rounding=rounding)
    rows = torch.randn(70, 256, generator=numbers) * torch.logspace(-3, 3, 70)[:, None]
    rows[3], rows[4, :2] = 0.0, torch.tensor([127.0, 0.5])
    found = on_device(known, parts).product(rows.to(DEVICE))
    assert torch.equal(found.cpu(), known.product(rows, parts))


def test_sums_of_whole_numbers_equal_numpys() -> None:
    numbers = torch.Generator().manual_seed(4)
    known = Codes(
        torch.randint(-128, 128, (20, 1024), generator=numbers, dtype=torch.int8),
        torch.ones(20, 1), None, 8, rounding=Rounding(1.0),
    )  # fmt: skip
    rows = torch.randint(-128, 128, (6, 1024), generator=numbers).float()
    rounded, scales, zeros = round_rows(rows.to(DEVICE), known.rounding or Rounding())
    assert torch.equal(rounded.cpu().float(), rows)
    assert scales.unique().tolist() == [1.0]
    assert zeros.unique().tolist() == [0]
    expected = rows.numpy().astype(np.int64) @ known.codes.numpy().astype(np.int64).T
    assert np.array_equal(on_device(known).product(rows.to(DEVICE)).cpu().numpy().astype(np.int64), expected)


@pytest.mark.parametrize("kind", ["int8", "int4", "float8", "float4", "rounded"])
@pytest.mark.parametrize("gather", [True, False])
def test_experts_of_sorted_pairs(kind: str, gather: bool) -> None:
    """Small and large tiles, and an expert without rows."""
    numbers = torch.Generator().manual_seed(5)
    known = codes("int8" if kind == "rounded" else kind, 5, 24, 96, groups=1 if kind == "rounded" else 3)
    if kind == "rounded":
        known = Codes(known.codes, known.scales, None, 8, rounding=Rounding(is_symmetric=False))
    held = on_device(known)
    for tokens in (1, 3, 140):
        ids = torch.rand(tokens, 4, generator=numbers).topk(2).indices
        pairs = Pairs.of(ids.to(DEVICE), 5)
        hidden = torch.randn(tokens, 96, generator=numbers)
        order = pairs.order.long().cpu()
        of_pairs, experts = hidden[order // 2], ids.reshape(-1)[order]
        bias = torch.randn(5, 24, generator=numbers)
        rows = (hidden if gather else of_pairs).to(DEVICE)
        found = held.product(rows, bias.to(DEVICE), pairs, gather=gather)
        expected = torch.stack(
            [held.expected(int(expert), row[None].to(DEVICE))[0].cpu() + bias[expert]
             for expert, row in zip(experts, of_pairs, strict=True)]
        )  # fmt: skip
        assert relative(found, expected) < 1e-5


# ---- whole models

EACH_PUSH = {("llama", "w4a16 asymmetric")}
CASES = [
    *((family, kind) for family in ("llama", "qwen3_moe") for kind in KINDS if kind != "deepseek's fp8"),
    ("gpt_oss", MXFP4),
]


def loaded(directory: Path, monkeypatch: pytest.MonkeyPatch, *, coded: bool) -> Any:
    """A model; ``coded``: as if a CPU were a device with our kernels."""
    monkeypatch.setattr(coded_products, "FEW_OUTPUTS", 64)  # fewer programs, which an interpreter computes
    with monkeypatch.context() as patch:
        patch.setattr(weights, "reads_codes", lambda _device: coded)
        settings = ModelConfig(model=str(directory))
        found = weights.load_model(read_model_info(directory), settings, dtype=FP32, device=DEVICE)
    found.module.set_attn_implementation("eager")
    return found


@pytest.mark.parametrize(
    ("family", "kind"),
    [pytest.param(*one, marks=() if one in EACH_PUSH else pytest.mark.nightly) for one in CASES],
)
def test_a_model_of_codes_gives_the_logits_of_the_widened_one(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes fewer bytes; logits are those of the checks of a start, too."""
    plain = make_tiny_model(tmp_path / "plain", family, intermediate_size=128)
    write_quantized(plain, kind, tmp_path / "quantized", tmp_path / "wide")
    expected, found = (loaded(tmp_path / "quantized", monkeypatch, coded=coded) for coded in (False, True))
    stands = [coded_of(each) for each in found.module.parameters()]
    assert any(each is not None for each in stands)
    for layer in expert_modules(found.module).values():
        assert coded_of(layer.gate_up_proj) is not None
        assert coded_of(layer.down_proj) is not None
    assert found.num_parameters == expected.num_parameters
    assert found.weight_bytes < expected.weight_bytes
    with torch.inference_mode():
        ids = torch.arange(3, 14, device=DEVICE)[None]
        one, other = (each.module(input_ids=ids, use_cache=False).logits for each in (expected, found))
    # Where inputs are rounded, and sums have other orders on a GPU, one number may round the other way.
    assert relative(other, one) < (3e-2 if kind.startswith("w8a8") and DEVICE.type == "cuda" else 1e-4)
    assert torch.equal(one.argmax(-1), other.argmax(-1))


def test_a_kernel_that_is_wrong_leaves_weights_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_tiny_model(tmp_path / "plain", "llama", intermediate_size=128)
    write_quantized(plain, "w8 asymmetric", tmp_path / "quantized", tmp_path / "wide")
    product = DeviceCodes.product

    def wrong(self: DeviceCodes, rows: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        return product(self, rows, *rest, **more) * 1.01

    def missing(*_arguments: Any, **_more: Any) -> torch.Tensor:
        raise RuntimeError("not compiled")

    monkeypatch.setattr(DeviceCodes, "product", wrong)
    model = loaded(tmp_path / "quantized", monkeypatch, coded=True)
    assert all(coded_of(each) is None for each in model.module.parameters())
    assert "differs from torch by" in caplog.text
    monkeypatch.setattr(DeviceCodes, "product", missing)
    model = loaded(tmp_path / "quantized", monkeypatch, coded=True)
    assert all(coded_of(each) is None for each in model.module.parameters())
    assert "a kernel fails: not compiled" in caplog.text


def test_experts_are_widened_again_where_other_kernels_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_tiny_model(tmp_path / "plain", "gpt_oss", intermediate_size=128)
    write_quantized(plain, MXFP4, tmp_path / "quantized", tmp_path / "wide")
    before = loaded(tmp_path / "quantized", monkeypatch, coded=False)
    monkeypatch.setattr(grouped_experts, "check_experts", lambda _layers: "they do not")
    monkeypatch.setattr(product_choice, "product_here", lambda _device, _dtype: "grouped_mm")
    after = loaded(tmp_path / "quantized", monkeypatch, coded=True)
    for one, other in zip(*(expert_modules(each.module).values() for each in (before, after)), strict=True):
        assert torch.equal(one.gate_up_proj, other.gate_up_proj)
        assert torch.equal(one.down_proj, other.down_proj)


def test_what_has_no_codes_is_left_as_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    before = model[0].weight
    assert not keep_weights_packed(model, CPU, experts=True).counts
    assert model[0].weight is before
    widen_again([model])


@pytest.mark.parametrize(
    ("capability", "is_rocm", "has_triton", "expected"),
    [((8, 0), False, True, True), ((12, 0), False, True, True), ((7, 5), False, True, False),
     ((9, 4), True, True, True), ((9, 0), False, False, False)],
)  # fmt: skip
def test_devices_whose_kernels_read_codes(
    capability: tuple[int, int],
    is_rocm: bool,
    has_triton: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
    monkeypatch.setattr(torch.version, "hip", "6.0" if is_rocm else None)
    monkeypatch.setattr(product_choice, "has_triton", lambda: has_triton)
    assert product_choice.reads_codes(torch.device("cuda")) is expected
    assert not product_choice.reads_codes(CPU)
