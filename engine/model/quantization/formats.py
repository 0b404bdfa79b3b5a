"""What a config.json says about quantised weights, and why some are refused (pure, no torch).

Formats: `compressed-tensors`_, block-wise fp8 as DeepSeek publishes it, GPTQ and AWQ as their tools write
them. Which matrices are quantised is seen in the files; what a file cannot say is taken from here.

.. _compressed-tensors: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

FIELDS = ("quantization_config", "compression_config", "quantization")
"""Fields of a config.json that say how weights are quantised; the last one is MLX's."""
MXFP4 = "mxfp4"
"""GPT-OSS's own; transformers widens it."""

Layout = Literal["scaled", "packed", "gptq", "awq"]
"""How a matrix is stored.

``scaled``: a tensor of int8 or float8 numbers beside its scales. ``packed``: compressed-tensors' int32 words.
"""

_LAYOUTS: dict[str, Layout] = {
    "int-quantized": "scaled",
    "float-quantized": "scaled",
    "naive-quantized": "scaled",
    "pack-quantized": "packed",
}
"""Formats of compressed-tensors that are read."""
_GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""What is added to stored zero points, by ``checkpoint_format``."""
_READ = "compressed-tensors (int8, int4 and fp8), fp8, gptq, awq, mxfp4 and GGUF files"


class Refused(ValueError):
    """Refusal of a quantised checkpoint.

    The text is the end of a sentence that says why, and what to do.
    """


class Format(msgspec.Struct, frozen=True):
    """How the quantised matrices of a checkpoint are stored."""

    method: str
    """``quant_method`` of config.json."""
    layouts: tuple[Layout, ...]
    """Those that may occur, one per matrix."""
    bits: int = 0
    """Bits of a number (GPTQ, AWQ); 0: the files say it."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: the shape of the scales says it."""
    zero_offset: int = 0
    """What is added to GPTQ's stored zero points."""
    rounds_activations: bool = False
    """Whether the checkpoint was made for activations in 8 bits, too."""


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The object of a config.json that describes the quantisation of any part of the model."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in FIELDS:
            if isinstance(found := part.get(name), dict) and found:
                return found
    return None


def method_of(config: Mapping[str, Any]) -> str | None:
    """The quantisation method that a config.json names; None for plain weights."""
    found = quantization_of(config)
    if found is None:
        return None
    return str(found.get("quant_method") or ("mlx" if "bits" in found else None))


def why_refused(config: Mapping[str, Any]) -> str:
    """Words for weights quantised in a way that is not read; else empty."""
    try:
        format_of(config)
    except Refused as refused:
        return str(refused)
    return ""


def format_of(config: Mapping[str, Any]) -> Format | None:
    """The format of the quantised weights; None for plain ones, and for MXFP4.

    Raises:
        Refused: it is none of those that are read.
    """
    found, method = quantization_of(config), method_of(config)
    if found is None or method == MXFP4:
        return None
    match method:
        case "gguf":  # of a directory that was made from a file
            return Format(method, ())
        case "compressed-tensors":
            return _compressed_tensors(found)
        case "fp8":
            block = _block(found.get("weight_block_size"))
            return Format(method, ("scaled",), block=block, rounds_activations=True)
        case "gptq":
            kind = str(found.get("checkpoint_format") or "gptq")
            if kind not in _GPTQ_OFFSETS:
                raise Refused(_not_read(f"gptq in the layout {kind}"))
            if found.get("dynamic"):
                raise Refused(_not_read("gptq with different bits per layer ('dynamic')"))
            return Format(method, ("gptq",), _bits(found, (4, 8)), zero_offset=_GPTQ_OFFSETS[kind])
        case "awq":
            version = str(found.get("version") or "gemm").lower()
            if version != "gemm":
                raise Refused(_not_read(f"awq in the layout {version}"))
            return Format(method, ("awq",), _bits(found, (4,)))
    raise Refused(_not_read(str(method)))


def _compressed_tensors(found: Mapping[str, Any]) -> Format:
    sparse = found.get("sparsity_config")
    if isinstance(sparse, dict) and sparse.get("format") not in (None, "dense"):
        raise Refused(_not_read(f"compressed-tensors in the sparse format {sparse['format']}"))
    if found.get("transform_config"):
        raise Refused(_not_read("compressed-tensors with transforms (rotations) of the activations"))
    layouts: dict[Layout, None] = {}
    blocks: set[tuple[int, int]] = set()
    rounds = False
    for group in _groups(found):
        named = str(group.get("format") or found.get("format"))
        if named not in _LAYOUTS:
            raise Refused(_not_read(f"compressed-tensors in the format {named}"))
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise Refused("has a group in its quantization_config that says nothing about 'weights'")
        layouts[_LAYOUTS[named]] = None
        if block := _block(weights.get("block_structure")):
            blocks.add(block)
        rounds |= bool(group.get("input_activations"))
    if len(blocks) > 1:
        raise Refused(_not_read("compressed-tensors with blocks of several sizes"))
    return Format(
        "compressed-tensors", tuple(layouts), block=next(iter(blocks), None), rounds_activations=rounds
    )


def _groups(found: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise Refused("has a quantization_config without 'config_groups': it does not say what is quantised")
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise Refused(f"has a quantization_config whose group {name} is no object")
        yield group


def _bits(found: Mapping[str, Any], possible: tuple[int, ...]) -> int:
    bits = found.get("bits", found.get("w_bit"))
    if bits not in possible:
        raise Refused(_not_read(f"{found.get('quant_method')} with {bits} bits"))
    return int(bits)


def _block(given: Any) -> tuple[int, int] | None:
    """Outputs and inputs of a block, given as two numbers or as text like 128x128."""
    if given is None:
        return None
    sizes = given.split("x") if isinstance(given, str) else given
    try:
        outputs, inputs = (int(each) for each in sizes)
    except (TypeError, ValueError):
        outputs = inputs = 0
    if outputs < 1 or inputs < 1:
        raise Refused(f"has a quantization_config with blocks of size {given!r}: two numbers are expected")
    return outputs, inputs


def _not_read(what: str) -> str:
    return (
        f"has weights quantised by {what}, which are not built: use a checkpoint in bfloat16, float16 or "
        f"float32, or one quantised by {_READ}"
    )
