"""Tiny models with recurrent states, of each kind of layer that is known."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.engine.tiny_models import save, widen
from tests.families.configs import make_config


def make_state_model(directory: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write a tiny model of a family and return its directory."""
    model = AutoModelForCausalLM.from_config(make_config(family), dtype=torch.float32)
    widen(model, 1)
    return save(model.to(dtype), directory)
