"""A model whose upper layers add nothing, and a draft model of the others."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from tests.engine.states.models import SHIPPED_FILES, SHIPPED_VOCAB
from tests.engine.tiny_models import make_tiny_model, save

LOWER = 1
"""Layers that add something."""
ADDING = ("o_proj", "down_proj")
"""Last products of attention and of MLPs or experts."""


def make_pair(directory: Path, family: str = "qwen3_moe", layers: int = 12) -> tuple[Path, Path]:
    """Write both models with the shipped tokenizer; returns their directories.

    Greedy proposals of the second are the tokens of the first, at a small part of its price.
    """
    sizes = {"vocab_size": SHIPPED_VOCAB, "max_position_embeddings": 4096, "eos_token_id": 0}
    deep = make_tiny_model(directory / "deep", family, layers=layers, **sizes)
    model = AutoModelForCausalLM.from_pretrained(deep, dtype=torch.float32)
    upper = tuple(f"model.layers.{number}." for number in range(LOWER, layers))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith(upper) and any(part in name for part in ADDING):
                weight.zero_()
    save(model, deep)
    small = AutoModelForCausalLM.from_pretrained(deep, num_hidden_layers=LOWER, dtype=torch.float32)
    draft = save(small, directory / "draft")
    for name in SHIPPED_FILES:
        for place in (deep, draft):
            shutil.copy(MODELS_DIRECTORY / SHIPPED_MODEL / name, place)
    return deep, draft
