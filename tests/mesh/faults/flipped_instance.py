"""An instance with one flipped bit in its weights, started as ``python -m tests.mesh.faults.flipped_instance``.

It loads its weights, has one bit of one number flipped, and then runs as any other instance. The number is in
the last norm, which every token goes through.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from engine import __main__ as engine
from engine.executor import loaded_shard
from engine.model.weights import LoadedModel, load_model

FLIPPED_BIT = 4
"""Bit of a bfloat16: of seven bits of its fraction, the third."""


def flip(weight: torch.Tensor) -> None:
    """Flip one bit of the first number [...] bfloat16."""
    assert weight.dtype is torch.bfloat16
    with torch.no_grad():
        weight.view(torch.int16).view(-1)[0] ^= 1 << FLIPPED_BIT


def load_with_flip(*args: Any, **kwargs: Any) -> LoadedModel:
    """Load a model as :func:`engine.model.weights.load_model`, then flip a bit."""
    model = load_model(*args, **kwargs)
    norms = [weight for name, weight in model.module.named_parameters() if name.endswith("model.norm.weight")]
    assert len(norms) == 1
    flip(norms[0])
    print("one bit of the last norm is flipped", flush=True)
    return model


if __name__ == "__main__":
    vars(loaded_shard)["load_model"] = load_with_flip
    sys.exit(engine.main())
