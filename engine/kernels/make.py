"""From a loaded model to a program that computes the same, if the kernels know models of its kind."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from engine.attention.base import PLAN_KEYWORD, PackedRows
from engine.attention.torch_paged import TorchPagedAttention
from engine.kernels import library
from engine.kernels.cache import NativeCache
from engine.kernels.decoder import Decoder, NotUsual, recognise
from engine.kernels.program import Program
from engine.kernels.weights import num_bytes
from engine.memory import MARGIN, available_memory
from engine.weights import LoadedModel

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Relative difference of a token's logits from those of the model's own modules, median over tokens: what
rounding makes (near-ties between experts and all), not what another formula makes."""

TABLES = np.array([[3, 0, 4], [2, 1, 0]], dtype=np.int32)
STEPS = [  # [(request, start, count)]: prompts in pieces, then decode beside a prompt
    [(1, 0, 9), (0, 0, 19)],
    [(1, 9, 1), (0, 19, 14)],
    [(0, 33, 1), (1, 10, 1)],
]


class _Off(Exception):
    """Torch computes this model; the message goes on where the log says "native kernels: off"."""


def bytes_for_program(model: LoadedModel, block_size: int) -> int:
    """What :func:`make_program` takes beside the model; 0 where torch computes, also for want of room."""
    if model.device.type != "cpu" or library.load() is None:
        return 0
    try:
        return num_bytes(_decoder_of(model, block_size))
    except _Off:
        return 0


def make_program(model: LoadedModel, block_size: int) -> Program | None:
    """A program that computes what the model does, or None where torch computes: on other devices and data
    types, without the kernels or the memory to lay the weights out for them, and for models of another kind.
    The model's own layers are emptied.
    """
    kernels = library.load() if model.device.type == "cpu" else None
    if kernels is None:
        return None
    began = time.monotonic()
    try:
        decoder = _decoder_of(model, block_size)
    except _Off as reason:
        logger.info("native kernels: off%s", reason)
        return None
    program = Program(kernels, decoder, model.experts)
    difference = _difference(program, model, block_size)
    if not difference <= TOLERANCE[model.dtype]:
        logger.info("native kernels: off for this model: results differ by %.2g", difference)
        return None
    if model.experts is not None:
        program.spread()
    _let_go(model)
    tiles = ", with AMX" if kernels.has_tiles and model.dtype == torch.bfloat16 else ""
    if saved := program.saved_bytes:
        share = saved / (program.weight_bytes + saved)
        tiles += f", weights compressed by {100 * share:.0f} %"
    logger.info("native kernels: on%s (prepared in %.1f s)", tiles, time.monotonic() - began)
    return program


def _decoder_of(model: LoadedModel, block_size: int) -> Decoder:
    """The model as the kernels know it.

    Raises:
        _Off: they do not, or have no room.
    """
    if not NativeCache.fits(block_size):
        raise _Off(f", --block-size {block_size} is not a multiple of 16")
    try:
        decoder = recognise(model.module, model.layers, model.dtype)
    except NotUsual as reason:
        raise _Off(f" for this model: {reason}") from reason
    needed, free = num_bytes(decoder), available_memory()
    if needed > free * (1 - MARGIN):
        sizes = f"{needed / 2**30:.1f} GiB of weights are laid out anew, and {free / 2**30:.1f} GiB are free"
        raise _Off(f", {sizes}; steps run on torch's own operators")
    return decoder


def _difference(program: Program, model: LoadedModel, block_size: int) -> float:
    """Between the two ways to compute a few steps of two requests."""
    own = TorchPagedAttention(
        model.layers, num_blocks=8, block_size=block_size, dtype=model.dtype, device=model.device
    )
    program.use(NativeCache(model.layers, num_blocks=8, block_size=block_size, dtype=model.dtype))
    differences = []
    with torch.inference_mode():
        for rows in STEPS:
            starts = np.array([start for _, start, _ in rows])
            counts = np.array([count for _, _, count in rows])
            positions = np.concatenate([np.arange(start, start + count) for _, start, count in rows])
            requests = [request for request, _, _ in rows]
            packed = PackedRows(starts, counts, TABLES[requests], positions, int((counts == 1).sum()))
            ids = (positions * 7919 + np.repeat(requests, counts) * 13) % model.vocab_size
            expected = (
                model.module(
                    input_ids=torch.from_numpy(ids).unsqueeze(0),
                    position_ids=torch.from_numpy(positions).unsqueeze(0),
                    use_cache=False,
                    **{PLAN_KEYWORD: own.plan(packed)},
                )
                .logits[0]
                .float()
            )
            found = program.forward(packed, ids, np.arange(len(ids)))
            spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
            differences.append((found - expected).norm(dim=-1) / spread.clamp(min=1e-6))
    return float(torch.cat(differences).median())


def _let_go(model: LoadedModel) -> None:
    """The program has its own copy of the layers. Spread experts stay: they may be dealt out anew."""
    kept = {id(weight) for layer in model.expert_layers for weight in layer.parameters()}
    base = getattr(model.module, model.module.base_model_prefix)
    for part in (base.layers, model.module.lm_head):
        for weight in part.parameters():
            if id(weight) not in kept and weight is not base.embed_tokens.weight:
                weight.data = weight.data.new_empty(0)
