"""Random adapters in PEFT's files, and models that have them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
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
    adapted.save_pretrained(directory)
    return adapted.eval()
