"""Quantised copies of the models of benchmarks, beside them, made at first use.

``int8`` (W8A8) and ``int4`` (groups of 32) are in the format of compressed-tensors. ``gptq`` and ``awq`` have
the codes and scales of ``int4``, laid out as these tools do it, so all systems compute with the same numbers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine.model.quantization.making import GROUP, quantize_checkpoint

Variant = Literal["int8", "int4", "gptq", "awq"]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each nibble of a word holds, lowest first."""
PACKED, SCALES, SHAPE = "weight_packed", "weight_scale", "weight_shape"
ROUTER = ".mlp.gate.weight"
WEIGHTS = "model.safetensors"

Words = npt.NDArray[np.uint32]


def variant_of(model: Path, variant: Variant) -> Path:
    """The directory of a copy."""
    target = model.parent / f"{model.name}-{variant}"
    if not (target / WEIGHTS).exists():
        if variant in ("int8", "int4"):
            quantize_checkpoint(model, target, variant)
        else:
            repack(variant_of(model, "int4"), target, variant)
    return target


def repack(source: Path, target: Path, variant: Variant) -> None:
    """Write a copy of an int4 checkpoint in another layout of the same numbers."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / WEIGHTS)
    owners = [name.removesuffix(f".{PACKED}") for name in tensors if name.endswith(f".{PACKED}")]
    for owner in owners:
        packed = tensors.pop(f"{owner}.{PACKED}").numpy().view(np.uint32)
        scales, shape = tensors.pop(f"{owner}.{SCALES}"), tensors.pop(f"{owner}.{SHAPE}").tolist()
        codes = np.stack([packed >> np.uint32(4 * at) & 15 for at in range(8)], axis=-1).reshape(shape)
        parts = {"scales": scales.T.to(torch.float16).contiguous()}
        for name, words in words_of(codes, variant).items():
            parts[name] = torch.from_numpy(words.view(np.int32))
        if variant == "gptq":
            parts["g_idx"] = torch.arange(shape[1], dtype=torch.int32) // GROUP
        tensors |= {f"{owner}.{name}": part for name, part in parts.items()}
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text())
    has_router = any(name.endswith(ROUTER) for name in tensors)
    config["quantization_config"] = described(variant, has_router=has_router)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, target / WEIGHTS, {"format": "pt"})


def words_of(codes: Words, variant: Variant) -> dict[str, Words]:
    """Words of codes [outputs, inputs] and of their zero points, which are all 8."""
    outputs, inputs = codes.shape
    groups = inputs // GROUP
    if variant == "gptq":  # along the inputs; zero points less one
        eights = codes.T.reshape(inputs // 8, 8, outputs).swapaxes(1, 2)
        zeros = np.full((groups, outputs // 8), 0x77777777, dtype=np.uint32)
        return {"qweight": joined(eights, range(8)), "qzeros": zeros}
    zeros = np.full((groups, outputs // 8), 0x88888888, dtype=np.uint32)
    return {"qweight": joined(codes.T.reshape(inputs, outputs // 8, 8), AWQ_ORDER), "qzeros": zeros}


def joined(eights: Words, order: Any) -> Words:
    """Words [...] of codes [..., 8]."""
    words = np.zeros(eights.shape[:-1], dtype=np.uint32)
    for at, number in enumerate(order):
        words |= eights[..., number].astype(np.uint32) << np.uint32(4 * at)
    return words


def described(variant: Variant, *, has_router: bool) -> dict[str, Any]:
    """The quantization_config.

    vLLM leaves out each module of AWQ with one of these names in its own. ``mlp.gate`` is in
    ``mlp.gate_up_proj``, of which it makes two matrices one.
    """
    common: dict[str, Any] = {"quant_method": variant, "bits": 4, "group_size": GROUP}
    if variant == "gptq":
        return common | {"sym": True, "desc_act": False, "checkpoint_format": "gptq", "lm_head": False}
    kept = ["lm_head", *(["mlp.gate"] if has_router else [])]
    return common | {"zero_point": True, "version": "gemm", "modules_to_not_convert": kept}
