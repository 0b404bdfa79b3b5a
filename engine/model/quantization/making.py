"""Quantised copies of a checkpoint, in the format of compressed-tensors (no torch).

Weights are rounded to the nearest code, with the scale out of a few that loses least. Matrices of attention
and MLPs are quantised; embeddings, routers and norms stay as they are.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["int8", "int4"]
"""W8A8 with a scale for each output, or W4A16 with one for 32 inputs."""
GROUP = 32
MATRIX = re.compile(r"\.(self_attn\.[qkvo]_proj|mlp(\.experts\.\d+)?\.(gate|up|down)_proj)\.weight")
LARGEST = {"int8": 127.0, "int4": 7.5}
"""Code of the largest number, for the first scale that is tried."""
RANGES = {"int8": (-127, 127), "int4": (-8, 7)}
SCALE_BITS = {"int8": 8, "int4": 5}
"""Significant bits of scales: those of bfloat16, or what codes of 4 bits leave.

Products of such scales and codes are bfloat16, so that kernels without AVX-512 have nothing to round.
"""
SHRINKING = np.linspace(0.7, 1.0, 31, dtype=np.float32)
"""Factors of the scales that are tried."""
DTYPES = {"F32": ("<f4", 4), "BF16": ("<u2", 2), "F16": ("<f2", 2)}
"""Types of weights that are read."""
WEIGHTS = "model.safetensors"

Floats = npt.NDArray[np.float32]
Tensor = tuple[str, tuple[int, ...], bytes]
"""Type, shape and content, as safetensors stores them."""


def quantize_checkpoint(source: Path, target: Path, kind: Kind) -> None:
    """Write a quantised copy of a checkpoint whose weights are in one file.

    Raises:
        ValueError: there is nothing to quantise, or it is quantised already.
    """
    config = json.loads((source / "config.json").read_text())
    if config.get("quantization_config"):
        raise ValueError(f"{source} is quantised already")
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape, content) in _read(source / WEIGHTS):
        if MATRIX.search(name) and dtype in DTYPES:
            tensors |= _quantized(name.removesuffix(".weight"), _floats(dtype, shape, content), kind)
        else:
            tensors[name] = dtype, shape, content
    if not any(name.endswith("weight_scale") for name in tensors):
        raise ValueError(f"{source} has no matrices of attention or MLPs that could be quantised")
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copy(path, target)
    config["quantization_config"] = _described(kind)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    _write(target / WEIGHTS, tensors)


def _described(kind: Kind) -> dict[str, Any]:
    """The ``quantization_config`` for a copy's config.json."""
    common = {"type": "int", "symmetric": True, "observer": "mse"}
    activations = None
    if kind == "int8":
        weights = common | {"num_bits": 8, "strategy": "channel", "dynamic": False}
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    else:
        weights = common | {"num_bits": 4, "strategy": "group", "group_size": GROUP, "dynamic": False}
    named = "int-quantized" if kind == "int8" else "pack-quantized"
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": named,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": named,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
    }


def _quantized(owner: str, weights: Floats, kind: Kind) -> dict[str, Tensor]:
    """Codes and scales of a matrix [outputs, inputs]."""
    outputs, inputs = weights.shape
    size = GROUP if kind == "int4" else inputs
    if inputs % size:
        raise ValueError(f"{owner} has {inputs} inputs, which are no groups of {size}")
    codes, scales = _codes(weights.reshape(outputs, -1, size), kind)
    found: dict[str, Tensor] = {
        f"{owner}.weight_scale": ("BF16", scales.shape, _bfloat16(scales).tobytes()),
    }
    flat = codes.reshape(outputs, inputs)
    if kind == "int8":
        found[f"{owner}.weight"] = "I8", flat.shape, flat.astype(np.int8).tobytes()
        return found
    words = np.zeros((outputs, inputs // 8), dtype=np.uint32)
    for number in range(8):
        words |= (flat[:, number::8] + 8).astype(np.uint32) << np.uint32(4 * number)
    found[f"{owner}.weight_packed"] = "I32", words.shape, words.tobytes()
    found[f"{owner}.weight_shape"] = "I64", (2,), np.array([outputs, inputs], dtype="<i8").tobytes()
    return found


def _codes(groups: Floats, kind: Kind) -> tuple[npt.NDArray[np.int32], Floats]:
    """Codes [outputs, groups, size] and scales [outputs, groups] that lose least, in the mean square."""
    least, most = RANGES[kind]
    largest = np.maximum(np.abs(groups).max(axis=-1) / LARGEST[kind], np.float32(1e-30))
    best = np.full(largest.shape, np.inf, dtype=np.float32)
    scales = np.zeros_like(largest)
    codes = np.zeros(groups.shape, dtype=np.int32)
    for factor in SHRINKING:
        tried = _rounded(largest * factor, SCALE_BITS[kind])
        found = np.clip(np.rint(groups / tried[..., None]), least, most)
        lost = np.square(found * tried[..., None] - groups).sum(axis=-1)
        better = lost < best
        best, scales = np.where(better, lost, best), np.where(better, tried, scales)
        codes[better] = found[better].astype(np.int32)
    return codes, scales


def _rounded(numbers: Floats, significant: int) -> Floats:
    """The nearest numbers of so many significant bits, ties to even."""
    bits, spare = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32), np.uint32(24 - significant)
    half = np.uint32((1 << (23 - significant)) - 1)
    return ((bits + half + (bits >> spare & 1)) >> spare << spare).view(np.float32)


def _bfloat16(numbers: Floats) -> npt.NDArray[np.uint16]:
    """The upper halves of numbers that are bfloat16."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def _widened(numbers: npt.NDArray[np.uint16]) -> Floats:
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def _floats(dtype: str, shape: tuple[int, ...], content: bytes) -> Floats:
    numbers = np.frombuffer(content, dtype=DTYPES[dtype][0]).reshape(shape)
    return _widened(numbers) if dtype == "BF16" else numbers.astype(np.float32)


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a file."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                file.seek(begin + first)
                yield name, (entry["dtype"], tuple(entry["shape"]), file.read(last - first))


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file; large numbers first, so that all begin at multiples of their size."""
    sizes = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1}
    names = sorted(tensors, key=lambda name: (-sizes.get(tensors[name][0], 8), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        dtype, shape, content = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(content)]}
        at += len(content)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            file.write(tensors[name][2])
