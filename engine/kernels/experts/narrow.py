"""Mixtures of a model's narrow copy: all experts with few columns, and made-up weights."""

from __future__ import annotations

from typing import Any

from engine.kernels.experts.mixture import Moe, shared_of
from engine.kernels.mlp.narrow import MOST_COLUMNS, make_up_projections, parts_beside_mixer
from engine.kernels.products.made_up import MadeUpWeights
from engine.kernels.products.projections import mlp_projections


def make_up(weights: MadeUpWeights, moe: Moe, layer: Any) -> None:
    """Make weights up for a mixture; half of each expert's columns are loud."""
    if moe.shared is not None:
        parts = parts_beside_mixer(layer)
        parts += [shared for shared in map(shared_of, parts) if shared is not None]
        found = (mlp_projections(part) for part in parts)
        make_up_projections(weights, moe.shared, next(each for each in found if each is not None))
    columns = min(moe.width, MOST_COLUMNS)
    hidden, module, count = moe.router.shape[1], moe.experts, moe.num_experts
    loud = range(columns // 2, columns)
    both, turned = moe.form.joined(columns, list(loud)), moe.form.is_transposed
    outputs = (1 + moe.form.has_gate) * columns
    weights.put(getattr(module, moe.form.first), (count, outputs, hidden), loud_rows=both, is_turned=turned)
    weights.put(module.down_proj, (count, hidden, columns), quiet_columns=loud, power=2, is_turned=turned)
    if moe.form.has_bias:
        weights.put(module.gate_up_proj_bias, (count, 2 * columns), size=0.2)
        weights.put(module.down_proj_bias, (count, hidden), size=0.2)
