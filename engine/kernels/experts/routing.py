"""Routers of mixtures: how their logits become experts and weights, as ``experts.hpp`` computes it.

A router is recognised by the weights and attributes that its forward pass reads. Scores are sigmoids where a
correction is added to them to choose by; the softmax of all logits otherwise. (The softmax of the chosen ones
alone is the same as theirs of all, divided by their sum.) What a router does besides is seen by the trial.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.norms.norm import Norm, norm_of

ROUTING = np.dtype(
    [(name, np.float64 if name in ("factor", "least", "near") else np.int64) for name in (
        "is_sigmoid", "is_normalised", "is_exact", "groups", "kept", "best_of_group", "factor", "least",
        "near", "correction", "scales", "copies"
    )]
)  # fmt: skip
"""See ``experts.hpp``."""

LEAST = 1e-20
"""The least sum that weights are divided by."""
ROUTERS = ("gate", "router")
"""Names of a router in its block."""
CORRECTIONS = "e_score_correction_bias", "expert_bias"
"""Names of what is added to scores to choose by."""
FACTORS = "routed_scaling_factor", "router_scaling_factor"
"""Names of the factor on the weights."""
EXACT = "num_group", "router_scaling_factor"
"""Attributes of routers that compute in float32."""


@dataclass(frozen=True)
class Routing:
    """Properties of a router's choice of experts."""

    top_k: int
    is_sigmoid: bool = False
    normalised: bool = True
    """Whether weights are divided by their sum."""
    factor: float = 1.0
    """Factor on the weights, behind that."""
    least: float = LEAST
    """The least sum that they are divided by."""
    is_exact: bool = False
    """Whether logits and weights are float32 in a model of another type."""
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1
    """Experts whose scores add up to a group's: the best ones."""
    near: float = 0.0
    """A weight is a share among experts whose logits are this near; 0: among all."""
    correction: torch.Tensor | None = None
    """[experts] in float32, added to the scores to choose by."""
    scales: torch.Tensor | None = None
    """[experts] in float32: factors on the weights of each. They are exact then."""

    def record(self, dtype: torch.dtype) -> np.ndarray[Any, Any]:
        """The record that the kernels get; ``dtype``: of the step. It points to the correction."""
        record = np.zeros((), dtype=ROUTING)
        record["is_sigmoid"], record["is_normalised"] = self.is_sigmoid, self.normalised
        record["is_exact"] = self.is_exact or dtype == torch.float32
        record["groups"], record["kept"] = self.groups, self.kept_groups
        record["best_of_group"] = self.best_of_group
        record["factor"], record["least"], record["near"] = self.factor, self.least, self.near
        if self.correction is not None:
            record["correction"] = self.correction.data_ptr()
        if self.scales is not None:
            record["scales"] = self.scales.data_ptr()
        return record


def router_of(block: Any) -> Any:
    """The module of a block's router.

    Raises:
        NotRecognised: there is none.
    """
    found = [part for name, part in block.named_children() if name in ROUTERS]
    if len(found) != 1:
        raise NotRecognised(f"{type(block).__name__} without a router")
    return found[0]


def weights_of(router: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A router's weight [experts, hidden] and bias.

    Raises:
        NotRecognised: it has other ones.
    """
    parameters = {
        name: weight for name, weight in router.named_parameters() if not name.endswith(CORRECTIONS)
    }
    linear = [name for name in parameters if name.rpartition(".")[2] == "weight"]
    if len(linear) != 1 or len(parameters) > 2:
        raise NotRecognised(f"a router with {', '.join(sorted(parameters))}")
    bias = parameters.pop(linear[0].replace("weight", "bias"), None)
    if len(parameters) != 1:
        raise NotRecognised(f"a router with {', '.join(sorted(parameters))}")
    return parameters[linear[0]], bias


def routing_of(block: Any, dtype: torch.dtype) -> Routing:
    """Properties of a block's router; ``dtype``: of the model.

    Raises:
        NotRecognised: it has no number of experts to choose.
    """
    router = router_of(block)
    weight, _ = weights_of(router)
    top_k = getattr(router, "top_k", getattr(block, "top_k", None))
    if not isinstance(top_k, int):
        raise NotRecognised("a router without top_k")
    correction, is_own = _correction(block, router)
    groups, kept = (_number(router, name) for name in ("num_group", "topk_group"))
    near = 2.0 * float(getattr(router, "router_jitter_noise", 0.0))
    limits_groups = groups > 1 and getattr(router, "topk_method", "group_limited_greedy") != "greedy"
    if limits_groups and (len(weight) % groups or kept * (len(weight) // groups) < top_k):
        raise NotRecognised(f"{groups} groups of experts, of which {kept} do not hold {top_k}")
    return Routing(
        top_k=top_k,
        is_sigmoid=is_own or getattr(router, "expert_selection_fn", None) == "sigmoid" or _has_switch(router),
        normalised=bool(getattr(router, "norm_topk_prob", not hasattr(router, "topk_method"))),
        factor=float(next((getattr(router, name) for name in FACTORS if hasattr(router, name)), 1.0)),
        least=float(getattr(router, "norm_min", LEAST)),
        is_exact=weight.dtype != dtype or near > 0 or any(hasattr(router, name) for name in EXACT),
        groups=groups if limits_groups else 1,
        kept_groups=kept if limits_groups else 1,
        best_of_group=1 if correction is None else 2,
        near=near,
        correction=correction,
    )


def scaled_routing_of(router: Any) -> tuple[Any, Norm, Routing]:
    """Product, norm and choice of a router with factors on both sides.

    Raises:
        NotRecognised: it is another router.
    """
    parameters = {name for name, _ in router.named_parameters()}
    if parameters != {"scale", "per_expert_scale", "proj.weight"}:
        raise NotRecognised(f"a router with {', '.join(sorted(parameters))}")
    hidden = router.proj.weight.shape[1]
    norm = norm_of(router.norm, hidden)
    scale = router.scale.detach().float() * float(router.scalar_root_size)
    scales = router.per_expert_scale.detach().to(torch.float32, copy=True)
    top_k = int(router.config.top_k_experts)
    return (
        router.proj,
        replace(norm, weights=norm.weights * scale),
        Routing(top_k, is_exact=True, scales=scales),
    )


def _correction(block: Any, router: Any) -> tuple[torch.Tensor | None, bool]:
    """The correction of a router, and whether it is of sigmoids.

    It is unless it lies in statistics beside the router's weight.
    """
    for holder, name in product((router, block), CORRECTIONS):
        if isinstance(found := getattr(holder, name, None), torch.Tensor):
            return _flat(found), True
    for holder, name in product(router.children(), CORRECTIONS):
        if isinstance(found := getattr(holder, name, None), torch.Tensor):
            return _flat(found), False
    return None, False


def _has_switch(router: Any) -> bool:
    """Whether a router's correction can be switched off: its scores are sigmoids all the same."""
    return hasattr(router, "use_expert_bias")


def _flat(correction: torch.Tensor) -> torch.Tensor:
    """A copy, since the model's own tensor may be emptied."""
    return correction.detach().reshape(-1).to(torch.float32, copy=True)


def _number(router: Any, name: str) -> int:
    value = getattr(router, name, None)
    return value if isinstance(value, int) else 1
