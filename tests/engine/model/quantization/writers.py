"""Quantised copies of tiny models, with what their weights are when widened again.

Layouts of compressed-tensors are written and widened by that library, and transformers widens MXFP4. GPTQ,
AWQ and DeepSeek's fp8 are written in numpy and torch here, from their tools' documents: there is no library
for all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Parts by their last names, and the widened matrix."""
Layout = tuple[dict[str, Any], Quantize]
"""The quantization_config, and how a matrix is written."""

LINEAR = re.compile(
    r"\.(self_attn\.\w+_proj(?:_with_mqa)?|mlp\.\w+_proj|experts\.\d+\.\w+|shared_experts?\.\w+_proj)\.weight$"
)
E4M3 = torch.float8_e4m3fn


def compressed(form: str, activations: bool = False, **weights: Any) -> Layout:
    """A format of compressed-tensors: its config, and how a matrix is written."""
    args = QuantizationArgs(**weights)
    return compressed_with(
        form, each_token(getattr(args.type, "value", args.type)) if activations else None, args
    )


def each_token(kind: str) -> QuantizationArgs:
    """Activations in 8 bits, with a scale for a token."""
    return QuantizationArgs(num_bits=8, type=kind, strategy="token", dynamic=True)


def compressed_with(form: str, inputs: QuantizationArgs | None, args: QuantizationArgs) -> Layout:
    """A format with these inputs and weights."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    kind = BaseCompressor.get_value_from_registry(form)

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        state = {"weight": weight, **_parameters(weight, args)}
        parts = kind.compress(state, scheme)
        parts = {name: part for name, part in parts.items() if part is not None}
        return parts, kind.decompress(dict(parts), scheme)["weight"].float()

    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "format": form}
    group["input_activations"] = inputs.model_dump(mode="json") if inputs else None
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return config | {"ignore": ["lm_head"], "quantization_status": "compressed"}, quantize


def _parameters(weight: torch.Tensor, args: QuantizationArgs) -> Tensors:
    """Scales and zero points."""
    outputs, inputs = weight.shape
    match args.strategy:
        case "tensor":
            ranges = weight.reshape(1, -1)
            shape: tuple[int, ...] = (1,)
        case "channel":
            ranges, shape = weight, (outputs, 1)
        case "group":
            size = args.group_size
            ranges, shape = weight.reshape(-1, size), (outputs, inputs // size)
        case "block":
            high, wide = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -inputs % wide, 0, -outputs % high))
            tiles = padded.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).transpose(1, 2)
            ranges, shape = tiles.flatten(2).flatten(0, 1), tuple(tiles.shape[:2])
        case other:
            raise ValueError(other)
    scale, zero = calculate_qparams(ranges.min(-1).values, ranges.max(-1).values, args)
    return {"weight_scale": scale.reshape(shape), "weight_zero_point": zero.reshape(shape)}


def in_another_order(group: int) -> Layout:
    """Groups of inputs that are no neighbours, as the library wrote them up to 0.13."""
    config, quantize_ordered = compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=group, symmetric=True
    )
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        back = torch.argsort(order)
        parts, wide = quantize_ordered(weight[:, order].contiguous())
        codes = unpack_from_int32(parts["weight_packed"], 4, weight.shape)
        parts["weight_packed"] = pack_to_int32(codes[:, back].contiguous(), 4)
        return parts | {"weight_g_idx": (back // group).to(torch.int32)}, wide[:, back]

    return config, quantize


def fp8_blocks(size: int) -> Layout:
    """DeepSeek's: blocks with the factor that widens them."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        scale = torch.empty(-(-outputs // size), -(-inputs // size))
        codes = torch.empty(weight.shape, dtype=E4M3)
        wide = torch.empty_like(weight)
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                at = slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size)
                scale[row, column] = weight[at].abs().max() / torch.finfo(E4M3).max
                codes[at] = (weight[at] / scale[row, column]).to(E4M3)
                wide[at] = codes[at].float() * scale[row, column]
        return {"weight": codes, "weight_scale_inv": scale}, wide

    return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [size, size]}, quantize


def fp8_tensor() -> Layout:
    """One scale for a matrix, and one for its activations, which is not used."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = weight.abs().max() / torch.finfo(E4M3).max
        codes = (weight / scale).to(E4M3)
        return {
            "weight": codes,
            "weight_scale": scale,
            "input_scale": torch.tensor(0.5),
        }, codes.float() * scale

    return {"quant_method": "fp8", "activation_scheme": "static"}, quantize


def gptq(bits: int, group: int, *, ordered: bool = False, version: str = "gptq") -> Layout:
    """GPTQ's words along the inputs; the first version stores zero points less one."""
    each = 32 // bits

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        groups = np.arange(inputs) // group
        if ordered:
            groups = np.random.default_rng(inputs).permutation(groups)
        codes, scales, zeros = _grouped(weight.float().numpy(), groups, bits)
        stored = zeros - (version == "gptq")
        parts = {
            "qweight": _words(codes.T.reshape(-1, each, outputs).transpose(0, 2, 1), bits),
            "qzeros": _words(stored.reshape(len(zeros), -1, each), bits),
            "scales": scales,
            "g_idx": groups.astype(np.int32),
        }
        wide = (codes - zeros[groups].T) * scales[groups].T
        return {
            name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()
        }, torch.from_numpy(wide.astype(np.float32))

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": False}
    return config | {"checkpoint_format": version}, quantize


def awq(group: int) -> Layout:
    """AWQ's words along the outputs: nibble i holds column ORDER[i] of eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        groups = np.arange(inputs) // group
        codes, scales, zeros = _grouped(weight.float().numpy(), groups, 4)
        parts = {
            "qweight": _words(codes.T.reshape(inputs, -1, 8)[:, :, order], 4),
            "qzeros": _words(zeros.reshape(len(zeros), -1, 8)[:, :, order], 4),
            "scales": scales,
        }
        wide = (codes - zeros[groups].T) * scales[groups].T
        return {
            name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()
        }, torch.from_numpy(wide.astype(np.float32))

    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }, quantize


def _grouped(weight: np.ndarray, groups: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [outputs, inputs], scales and zero points [groups, outputs] of a matrix [outputs, inputs]."""
    most = 2**bits - 1
    count = int(groups.max()) + 1
    low = np.stack([np.minimum(weight[:, groups == g].min(1), 0) for g in range(count)])
    high = np.stack([np.maximum(weight[:, groups == g].max(1), 0) for g in range(count)])
    scales = ((high - low) / most).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), 1, most).astype(np.int64)
    codes = np.clip(np.rint(weight / scales[groups].T) + zeros[groups].T, 0, most).astype(np.int64)
    return codes, scales, zeros


def _words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Words of the numbers in the last dimension, lowest bits first."""
    shifts = np.arange(numbers.shape[-1], dtype=np.uint64) * np.uint64(bits)
    return (numbers.astype(np.uint64) << shifts).sum(-1, dtype=np.uint64).astype(np.uint32).view(np.int32)


KINDS: dict[str, Callable[[], Layout]] = {
    "w8a8 per channel": lambda: compressed(
        "int-quantized", True, num_bits=8, strategy="channel", symmetric=True
    ),
    "w8a8 per tensor": lambda: compressed(
        "int-quantized", True, num_bits=8, strategy="tensor", symmetric=True
    ),
    "w8 asymmetric": lambda: compressed("naive-quantized", num_bits=8, strategy="channel", symmetric=False),
    "w4a16 groups": lambda: compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=True
    ),
    "w4a16 asymmetric": lambda: compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False
    ),
    "w4a16 in another order": lambda: in_another_order(16),
    "w4a16 per channel": lambda: compressed(
        "pack-quantized", num_bits=4, strategy="channel", symmetric=False
    ),
    "w8a16 groups": lambda: compressed(
        "pack-quantized", num_bits=8, strategy="group", group_size=16, symmetric=True
    ),
    "fp8 per channel": lambda: compressed(
        "float-quantized", True, num_bits=8, type="float", strategy="channel", symmetric=True
    ),
    "fp8 in blocks": lambda: compressed(
        "float-quantized",
        True,
        num_bits=8,
        type="float",
        strategy="block",
        block_structure=[16, 32],
        symmetric=True,
    ),
    "deepseek's fp8": lambda: fp8_blocks(20),
    "fp8 in blocks of 32": lambda: fp8_blocks(32),
    "fp8 per tensor": fp8_tensor,
    "gptq": lambda: gptq(4, 16),
    "gptq in another order": lambda: gptq(4, 16, ordered=True),
    "gptq of 8 bits, second version": lambda: gptq(8, 32, version="gptq_v2"),
    "awq": lambda: awq(16),
}


MXFP4 = "mxfp4"
"""The experts of GPT-OSS; not one of :data:`KINDS`, which are for single matrices."""


def write_quantized(source: Path, kind: str, quantized: Path, widened: Path) -> None:
    """Write two copies of a model in a layout of :data:`KINDS` or :data:`MXFP4`; see :func:`write_copies`."""
    if kind == MXFP4:
        write_mxfp4(source, quantized, widened)
    else:
        write_copies(source, KINDS[kind](), quantized, widened)


def write_mxfp4(
    source: Path, quantized: Path, widened: Path, exponents: tuple[int, int] = (122, 125)
) -> None:
    """Write two copies of a GPT-OSS: its experts random numbers in MXFP4, and these widened.

    ``exponents``: the least one of a block, and the least that none has.
    """
    tensors = load_file(source / "model.safetensors")
    packed, wide = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(*exponents, shape, dtype=torch.uint8, generator=generator)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            wide[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    _write_copy(source, quantized, packed, {"quantization_config": config})
    _write_copy(source, widened, wide, {})


def write_copies(
    source: Path,
    layout: Layout,
    quantized: Path,
    widened: Path,
    further: Callable[[str], Tensors] = lambda _: {},
) -> None:
    """Write two copies of a model: quantised, and with the same weights widened again.

    ``further``: parts of a matrix that do not follow from it, by its name without ``.weight``.
    """
    config, quantize = layout
    tensors = load_file(source / "model.safetensors")
    packed, wide = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if LINEAR.search(name) and weight.shape[1] % 16 == 0:
            del packed[name]
            parts, wide[name] = quantize(weight)
            parts |= further(name.removesuffix(".weight"))
            packed |= {
                f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()
            }
    _write_copy(source, quantized, packed, {"quantization_config": config})
    _write_copy(source, widened, wide, {})


def _write_copy(source: Path, directory: Path, tensors: Tensors, more: dict[str, Any]) -> None:
    """A copy of a model with other tensors, and ``more`` in its config.json."""
    directory.mkdir(exist_ok=True)
    said = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(said | more))
    for path in source.glob("*.json"):
        if path.name != "config.json":
            (directory / path.name).write_bytes(path.read_bytes())
    whole = {name: each.contiguous() for name, each in tensors.items()}
    save_file(whole, directory / "model.safetensors", {"format": "pt"})
