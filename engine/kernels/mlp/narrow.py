"""MLPs of a model's narrow copy: few columns, and made-up weights."""

from __future__ import annotations

from typing import Any

from engine.kernels.core.base_model import is_mixer
from engine.kernels.mlp.mlp import Mlp
from engine.kernels.products.activations import ActivationKind
from engine.kernels.products.made_up import MadeUpWeights
from engine.kernels.products.projections import mlp_projections

MOST_COLUMNS = 16
"""Width of a copy's MLP, and of each expert."""
SQUARED = ActivationKind.RELU_SQUARED, ActivationKind.XIELU


def parts_beside_mixer(layer: Any) -> list[Any]:
    """The modules of a layer that do not look at other tokens."""
    return [part for _, part in layer.named_children() if not is_mixer(part)]


def make_up(weights: MadeUpWeights, mlp: Mlp, layer: Any) -> None:
    """Make weights up for the MLP of a layer."""
    found = (mlp_projections(part) for part in parts_beside_mixer(layer))
    make_up_projections(weights, mlp, next(each for each in found if each is not None))


def make_up_projections(weights: MadeUpWeights, mlp: Mlp, projections: list[Any]) -> None:
    """Make weights up for an MLP's linear layers; half of its columns are loud."""
    columns, (*inward, down) = min(mlp.width, MOST_COLUMNS), projections
    loud, hidden = range(columns // 2, columns), mlp.down.shape[0]
    both, power = [*loud, *(columns + index for index in loud)], 1 if mlp.gate is None else 2
    if len(inward) == 1 and mlp.gate is not None:
        weights.linear(inward[0], 2 * columns, hidden, "gate and up", loud_rows=both)
    else:
        for each, role in zip(inward, ("gate", "up"), strict=False):
            weights.linear(each, columns, hidden, role, loud_rows=loud)
    if mlp.activation.kind in SQUARED:
        power *= 2
    weights.linear(down, hidden, columns, quiet_columns=loud, power=power)
