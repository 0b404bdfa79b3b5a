"""Random adapters in PEFT's files, and models that have them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(model: Path, directory: Path, seed: int = 0, **settings: Any) -> Any:
    """Save a random adapter of a model; returns transformers' model with it, in float32."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(**({"r": 8, "lora_alpha": 16, "target_modules": PROJECTIONS} | settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(directory)
    return adapted.eval()


def make_adapter_of_each_expert(model: Path, directory: Path, seed: int = 0, rank: int = 4) -> Any:
    """The same with projections of each expert, as PEFT saved them when experts were modules."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in base.named_modules():
        if not name.endswith(".mlp.experts"):
            continue
        count, hidden, width = module.down_proj.shape
        for expert in range(count):
            for projection, inputs, outputs in (
                ("gate_proj", hidden, width),
                ("up_proj", hidden, width),
                ("down_proj", width, hidden),
            ):
                for matrix, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    place = f"base_model.model.{name}.{expert}.{projection}.lora_{matrix}.weight"
                    tensors[place] = torch.randn(shape, generator=generator) * 0.1
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=["gate_proj", "up_proj", "down_proj"])
    config.save_pretrained(directory)
    save_file(tensors, directory / "adapter_model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(base, directory).eval()
