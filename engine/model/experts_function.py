"""Functions that compute expert layers: the choice by device, and experts spread over instances."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.attention.base import IMPLEMENTATION
from engine.gpu import grouped_experts, product_choice
from engine.gpu.coded_parameter import coded_of
from engine.model.checkpoint import CheckpointError
from engine.model.coded_layers import widen_again
from engine.model.expert_weights import ExpertShare, expert_modules
from engine.model.sharding.shard import Shard
from parallel.expert_parallel import ATTRIBUTE as EXPERTS_ATTRIBUTE
from parallel.expert_parallel import LAYER_ATTRIBUTE, Dispatch, ExpertParallel, expert_forward
from parallel.placement import assign_experts
from parallel.sliced_experts import TokenSlices
from parallel.tensor_parallel import TensorRank

logger = logging.getLogger(__name__)

EXPERTS_IMPLEMENTATION = "grouped_mm"
"""transformers' implementation of MoE layers: tokens sorted by expert, one product per expert.

Measured on CPU (16 experts, 4 per token; batch 1, 8, 32): 12, 28, 48 ms a step, against 13, 38, 55 with
``eager`` (a Python loop) and 20, 164, 777 with ``batched_mm`` (copies the weights for each token).
"""


def choose_experts_function(module: Any) -> str:
    """Name of the function in transformers' registry for a model's experts.

    The model is on its device.

    What our own kernels compute is compared first; the choice is logged.
    """
    layers = list(expert_modules(module).values())
    coded = [each for each in layers if any(map(coded_of, each.parameters()))]
    if not layers or (next(module.parameters()).device.type != "cuda" and not coded):
        return EXPERTS_IMPLEMENTATION
    grouped_experts.register(ALL_EXPERTS_FUNCTIONS)
    weight = next(layers[0].parameters())
    return _name(layers, coded, weight.device, weight.dtype)


def _name(layers: Sequence[Any], coded: Sequence[Any], device: torch.device, dtype: torch.dtype) -> str:
    product = "triton" if coded else product_choice.product_here(device, dtype)
    if product == "batched_mm":
        logger.warning("experts: without Triton, steps with prompts wait for the device in each layer")
        return grouped_experts.FEW_NAME
    if not product_choice.has_triton():
        return EXPERTS_IMPLEMENTATION
    began = time.monotonic()
    problem = grouped_experts.check_experts(layers)
    if problem is None:
        logger.info("experts: %s, checked in %.1f s", product, time.monotonic() - began)
        return grouped_experts.NAME
    logger.warning("experts: without Triton kernels, since they cannot serve: %s", problem)
    if coded:
        widen_again(coded)
        product = product_choice.product_here(device, dtype)
    return EXPERTS_IMPLEMENTATION if product == "grouped_mm" else grouped_experts.FEW_NAME


def spread_experts(
    module: Any, share: ExpertShare, dispatch: Dispatch, shard: Shard
) -> tuple[ExpertParallel, tuple[Any, ...]]:
    """Let the expert layers go through one :class:`ExpertParallel`.

    Each tensor-parallel rank of the shard dispatches its slice of the tokens.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, expert_forward)
    local_experts = ALL_EXPERTS_FUNCTIONS[choose_experts_function(module)]
    layers = tuple(expert_modules(module).values())
    slices = TokenSlices(TensorRank(shard.rank, shard.size, shard.ranks)) if shard.size > 1 else None
    experts = ExpertParallel(
        share.placement, share.rank, dispatch, local_experts, max(1, len(layers)), slices
    )
    for number, layer in enumerate(layers):
        setattr(layer, EXPERTS_ATTRIBUTE, experts)
        setattr(layer, LAYER_ATTRIBUTE, number)
    module.set_experts_implementation(IMPLEMENTATION)
    return experts, layers


def fix_experts(module: Any) -> None:
    """Let experts be multiplied by kernels whose tiles do not follow the number of tokens.

    Raises:
        CheckpointError: these kernels cannot serve.
    """
    layers = list(expert_modules(module).values())
    if not layers:
        return
    grouped_experts.register(ALL_EXPERTS_FUNCTIONS)
    if problem := grouped_experts.check_experts(layers, grouped_experts.fixed_forward):
        raise CheckpointError(f"--batch-invariant: the kernels of experts cannot serve: {problem}")
    module.set_experts_implementation(grouped_experts.FIXED_NAME)


def sum_experts_in_order(module: Any) -> None:
    """Let experts that are all held here go through an :class:`ExpertParallel`, too.

    It computes one product for each expert, and sums a token's in the order of their choice.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, expert_forward)
    layers = [each for each in expert_modules(module).values() if not hasattr(each, EXPERTS_ATTRIBUTE)]
    alone: dict[int, ExpertParallel] = {}
    for layer in layers:
        count = int(layer.num_experts)
        if count not in alone:
            placement = assign_experts(count, 1, "linear")
            local_experts = ALL_EXPERTS_FUNCTIONS[choose_experts_function(module)]
            alone[count] = ExpertParallel(placement, 0, "allgather_reducescatter", local_experts)
        setattr(layer, EXPERTS_ATTRIBUTE, alone[count])
    if layers:
        module.set_experts_implementation(IMPLEMENTATION)
