"""Experts of another version of the weights, where an instance holds some of each layer.

They are those that it holds when the version is prepared. If the placement changes until the switch, the
others are read when the instance enters the group that wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.config.quantization import OnlineName
from engine.model.expert_change import HeldExperts
from engine.model.expert_weights import ExpertShare, expert_modules, expert_parameters, read_experts
from engine.model.quantization.attached import reader_of
from engine.model.quantization.layers import attach_expert_codes
from parallel.placement import Placement

Tensors = dict[str, torch.Tensor]


class SpreadWeights:
    """Spread experts of one version, until they take the place of those in use."""

    def __init__(self, module: Any, held: HeldExperts, num_experts: int, directory: Path) -> None:
        """``module``: the model whose experts are ``held``.

        ``num_experts``: those of a layer, over all instances.
        """
        self._module, self._held = module, held
        self._directory = directory
        self._experts = held.experts
        """Experts by layer when this was made."""
        first = set(self._experts[0] if self._experts else ())
        owners = tuple(0 if expert in first else 1 for expert in range(num_experts))
        self.share = ExpertShare(Placement(owners, 2), 0)
        """Experts of the first layer, which are to be read in all layers."""
        self._parameters: dict[str, dict[str, torch.nn.Parameter]] = {}

    def __repr__(self) -> str:
        return f"<SpreadWeights of {self._directory}, {len(self._parameters)} layers>"

    def take(self, tensors: Tensors, online: OnlineName | None, should_stop: Callable[[], bool]) -> Tensors:
        """Take the experts out of what was read; returns the rest.

        Those of layers that hold others than the first one are read now. ``online``: how they are quantised.

        Raises:
            engine.model.checkpoint.CheckpointError: they cannot be read.
            engine.model.checkpoint.ReadingStopped: ``should_stop`` returned True.
        """
        layers = expert_modules(self._module)
        types = {
            path: {name: each.dtype for name, each in expert_parameters(layer)}
            for path, layer in layers.items()
        }
        rows = {f"{path}.{name}": tensors[f"{path}.{name}"] for path, own in types.items() for name in own}
        other = [experts if experts != self._experts[0] else () for experts in self._experts]
        if any(other):
            rows |= read_experts(self._module, self._directory, other, should_stop, online)
        on_built = self._held.on_built
        for path, own in types.items():
            made = {name: _parameter(name, rows[f"{path}.{name}"], dtype) for name, dtype in own.items()}
            self._parameters[path] = made
            if on_built is not None:
                on_built(layers[path], made, [-1] * len(made[next(iter(own))]))
        return {name: tensor for name, tensor in tensors.items() if name not in rows}

    def switch(self, weights: str) -> None:
        """Hold these experts from the next step on; ``weights``: the digest of their version."""
        self._held.replace(self._directory, self._experts, self._parameters, weights)


def _parameter(name: str, rows: torch.Tensor, dtype: torch.dtype) -> torch.nn.Parameter:
    """Parameter [experts, ...] of a module, with the codes of its rows.

    ``dtype``: of the model, which its files may not have.
    """
    made = torch.nn.Parameter(rows.data.to(dtype), requires_grad=False)
    if (codes := reader_of(rows)) is not None:
        attach_expert_codes(made, name, codes)
    return made
