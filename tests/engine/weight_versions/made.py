"""Checkpoints that differ from another one in numbers alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Change = Callable[[str, torch.Tensor], torch.Tensor]


def trained(directory: Path, into: Path, seed: int = 1, change: Change | None = None) -> Path:
    """A copy of a checkpoint after a made-up training step; all matrices change by default."""
    generator = torch.Generator().manual_seed(seed)

    def nudged(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        spread = tensor.float().std().nan_to_num(0.1) if tensor.numel() > 1 else 0.1
        noise = torch.randn(tensor.shape, generator=generator) * spread
        return (tensor.float() + 0.3 * noise).to(tensor.dtype)

    shutil.copytree(directory, into, dirs_exist_ok=True)
    for path in sorted(into.glob("*.safetensors")):
        tensors = {name: (change or nudged)(name, each) for name, each in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    return into
