"""Choice of the function that computes the experts held here, by device."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.gpu import grouped_experts, product_choice
from engine.gpu.coded_parameter import coded_of
from engine.model.coded_layers import widen_again
from engine.model.expert_weights import expert_modules

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
