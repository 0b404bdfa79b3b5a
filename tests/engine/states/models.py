"""Tiny models with recurrent states, of each kind of layer that is known.

``python -m tests.engine.states.models qwen3_next DIRECTORY`` writes one that ``serve DIRECTORY`` takes.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from tests.engine.tiny_models import save, widen
from tests.families.configs import POSITIONS, make_config

SHIPPED_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SHIPPED_VOCAB = 4096
"""Tokens of the shipped model's tokenizer."""
LONGEST = 16384
"""Context length of a model that is served."""

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96},
    ),
}
"""Name -> model type, and sizes of a form that its published models have, too."""
EACH_PUSH = ["lfm2", "nemotron_h", "qwen3_next"]
NATIVE = [
    *EACH_PUSH,
    *("lfm2_moe", "lfm3", "mamba2", "granitemoehybrid", *FORMS, "bamba", "falcon_h1"),
    *("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"),
]
"""Families that the native kernels compute."""
BY_TORCH = ["zamba2", "jamba", "bailing_hybrid", "falcon_mamba", "mamba", "zamba"]
"""Families that torch alone computes."""


def at_night(families: Sequence[str], each_push: Sequence[str] = ()) -> list[Any]:
    """Parameters of a test: few families for each push, all of them at night."""
    return [
        family if family in each_push else pytest.param(family, marks=pytest.mark.nightly)
        for family in families
    ]


def make_state_model(directory: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write a tiny model of a family and return its directory."""
    return _make(_config(family), directory, dtype)


def make_servable_model(directory: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a tiny model with the shipped tokenizer and long contexts; returns its directory."""
    sizes = dict.fromkeys(POSITIONS, LONGEST) | {
        "vocab_size": SHIPPED_VOCAB,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    _make(_config(family, **sizes), directory, dtype)
    for name in SHIPPED_FILES:
        shutil.copy(MODELS_DIRECTORY / SHIPPED_MODEL / name, directory)
    return directory


def _config(family: str, **sizes: Any) -> PreTrainedConfig:
    model_type, own = FORMS.get(family, (family, {}))
    return make_config(model_type, **sizes, **own)


def _make(config: PreTrainedConfig, directory: Path, dtype: torch.dtype) -> Path:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    widen(model, 1)
    return save(model.to(dtype), directory)


def generated(directory: Path, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of transformers in float32, with all of a context computed for each."""
    own = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()
    options = {"max_new_tokens": count, "do_sample": False, "use_cache": False, "eos_token_id": None}
    with torch.no_grad():
        return [
            own.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts
        ]


if __name__ == "__main__":
    make_servable_model(Path(sys.argv[2]), sys.argv[1])
