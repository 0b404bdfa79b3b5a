"""Script that quantises models with llmcompressor, run in an environment of its own.

    python made_by_llmcompressor.py SCHEME MODEL QUANTIZED WIDENED

It imports nothing of Lockstep's: llmcompressor pins another transformers. QUANTIZED is what the tool saves.
WIDENED has the same weights as compressed-tensors, in the release that the tool brings, widens them in float32.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMES = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "GPTQ")
"""Presets of the tool.

GPTQ is its W4A16, with weights calibrated in the order of activations.
"""
CALIBRATION = (16, 48)
"""Prompts and tokens of each that GPTQ looks at."""
IGNORED = ["lm_head", "re:.*mlp.gate$"]


def quantize(scheme: str, source: Path, quantized: Path) -> None:
    """Write what llmcompressor makes of a model."""
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    linearize_moe(model)
    if scheme != "GPTQ":
        recipe: Any = QuantizationModifier(targets="Linear", scheme=scheme, ignore=IGNORED)
        oneshot(model=model, recipe=recipe)
    else:
        prompts, length = CALIBRATION
        ids = torch.randint(3, model.config.vocab_size, (prompts, length), generator=_generator())
        text = torch.utils.data.DataLoader(
            [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids], batch_size=1
        )
        recipe = GPTQModifier(targets="Linear", scheme="W4A16", ignore=IGNORED, actorder="static")
        oneshot(
            model=model,
            recipe=recipe,
            dataset=text,
            num_calibration_samples=prompts,
            processor=_no_tokenizer(),
        )
    model.save_pretrained(quantized, save_compressed=True)


def _no_tokenizer() -> Any:
    """One that is asked for and not used: prompts are ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, "x")))


def _generator() -> Any:
    import torch

    return torch.Generator().manual_seed(0)


def widen(quantized: Path, source: Path, widened: Path) -> None:
    """Write a plain model with the weights that the library finds."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import load_file, save_file

    said = json.loads((quantized / "config.json").read_text())["quantization_config"]
    (group,) = said["config_groups"].values()
    kind = BaseCompressor.get_value_from_registry(group.get("format") or said["format"])
    scheme = QuantizationScheme(**{name: each for name, each in group.items() if name != "format"})
    tensors = load_file(quantized / "model.safetensors")
    for owner in list(_owners(tensors)):
        parts = {name: tensors.pop(f"{owner}.{name}") for name in _parts(tensors, owner)}
        tensors[f"{owner}.weight"] = kind.decompress(_in_float32(parts), scheme)["weight"].float()
    widened.mkdir()
    wide = {name: each.float().contiguous() for name, each in tensors.items()}
    save_file(wide, widened / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "config.json", widened)


def _owners(tensors: dict[str, Any]) -> Iterator[str]:
    for name in tensors:
        if name.endswith(".weight_scale"):
            yield name.removesuffix(".weight_scale")


def _parts(tensors: dict[str, Any], owner: str) -> list[str]:
    """Last names of the tensors of a matrix."""
    found = [name.removeprefix(f"{owner}.") for name in tensors if name.startswith(f"{owner}.")]
    return [name for name in found if name.startswith("weight")]


def _in_float32(parts: dict[str, Any]) -> dict[str, Any]:
    """Scales as float32, in which the library then computes."""
    return {name: each.float() if name == "weight_scale" else each for name, each in parts.items()}


def main() -> int:
    scheme, source, quantized, widened = sys.argv[1:]
    quantize(scheme, Path(source), Path(quantized))
    widen(Path(quantized), Path(source), Path(widened))
    return 0


if __name__ == "__main__":
    sys.exit(main())
