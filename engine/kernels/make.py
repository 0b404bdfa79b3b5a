"""Makes the program of a loaded model, if the kernels know models of its kind.

Two things are checked. That the kernels compute what the model's code computes is tried on a copy of each
shard (:mod:`engine.kernels.trial`). That the model's own weights are laid out right is seen in a few steps of
the model.

All shards of a model have a program or none has: the tensor-parallel ranks of a stage add up in every layer,
so theirs are the same kernels; and only behind the last stage there are logits to compare.

Whatever goes wrong here, torch can compute the model: so no error but a lost shard leaves this module.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.base import PLAN_KEYWORD, Int64s, LayerShape, PackedRows
from engine.attention.torch_paged import TorchPagedAttention
from engine.host.memory import MARGIN, available_memory
from engine.kernels.adapters.sites import AdapterRoom
from engine.kernels.attention.latent import is_latent
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.cache.native_states import NativeStates
from engine.kernels.core import library
from engine.kernels.core.base_model import base_parts
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.decoder import DecoderModel, recognise
from engine.kernels.lowering import buffers
from engine.kernels.program import Program
from engine.kernels.trial import judge
from engine.model.quantization.attached import forget_codes
from engine.model.weights import LoadedModel
from engine.pieces.kinds import BoundaryKind
from engine.states.grid import NATIVE_GRID
from engine.states.held import StateRows
from parallel.communicators.base import CollectiveError
from parallel.kernel_kinds import KINDS
from parallel.tensor_parallel import TensorRank

logger = logging.getLogger(__name__)

FLOAT32_TOLERANCE = 1e-3
"""Largest relative difference of a token's logits in float32, median over tokens.

The comparison is with the model's own modules.
"""
ROUNDINGS = 10.0
"""Largest difference in bfloat16, in units of rounding.

The unit is that of a copy of the shard with made-up weights. Near-ties between experts cost a model with
wider experts more (6 units were seen); weights in a wrong place cost 50 and more.
"""

TABLES = np.array([[3, 0, 4], [2, 1, 0]], dtype=np.int32)
STEPS = [  # [(request, start, count)]: prompts in pieces, then decode beside a prompt
    [(1, 0, 9), (0, 0, 19)],
    [(1, 9, 1), (0, 19, 14)],
    [(0, 33, 1), (1, 10, 1)],
]
SLOTS = 4
"""Slots for the recurrent states of these steps."""


class _Off(Exception):
    """Reason why torch computes this model, logged as "native kernels: off"."""


def bytes_for_program(
    model: LoadedModel, block_size: int, largest: buffers.BufferRoom | None = None, requests: int = 0
) -> int:
    """Bytes that :func:`make_program` takes beside the model, its ``largest`` step and running ``requests``.

    0 where torch computes, also for want of room.
    """
    if model.device.type != "cpu" or library.load() is None:
        return 0
    try:
        decoder = _decoder_of(model, block_size)
        room = 0 if largest is None else buffers.num_bytes(decoder.needs, largest)
        rows = NativeStates(decoder.states, decoder.dtype).request_bytes
        return decoder.num_bytes + room + requests * rows
    except _Off:
        return 0


class KeptForms(NamedTuple):
    """Forms of what a model keeps of requests: those of the kernels, or of torch."""

    layers: tuple[LayerShape, ...]
    """Shapes of what attention layers cache of a token."""
    states: BoundaryKind | None
    """Kind of recurrent states; None: no layer has one."""


def kept_by_torch(model: LoadedModel) -> KeptForms:
    """What torch's modules keep."""
    return KeptForms(model.layers, None if model.states is None else model.states.kind)


def kept_of(model: LoadedModel, block_size: int, *, has_states: bool) -> KeptForms:
    """What is kept: for the kernels where they compute, else for torch.

    The kernels may keep less than torch, or states on another grid. Then they are tried now: a cache for
    those is none for torch, so :func:`make_program` must not fail later for a reason that can be known.
    ``has_states``: whether any worker's layers have a recurrent state; then all shards call this together.

    Raises:
        parallel.communicators.base.CollectiveError: another shard is lost.
    """
    on_cpu = model.device.type == "cpu"
    must_try = on_cpu and (has_states or any(map(is_latent, model.module.modules())))
    kernels = library.load() if must_try else None
    decoder = None
    if kernels is not None:
        with suppress(_Off):
            decoder = _prove(kernels, model, block_size).decoder
    if has_states:
        is_ours = kernels is not None and decoder is not None
        if not _all_have(model, kernels.key if kernels is not None and is_ours else None):
            decoder = None
    if decoder is None:
        return kept_by_torch(model)
    states = NativeStates(decoder.states, decoder.dtype).kind if decoder.states else None
    return KeptForms(decoder.cached, states)


def make_program(model: LoadedModel, block_size: int, adapters: AdapterRoom | None = None) -> Program | None:
    """A program that computes what the model does, or None where torch computes.

    Torch computes on other devices and data types, without the kernels or the memory to lay the weights out
    for them, and for models of another kind. The model's own layers are emptied. All shards of a model call
    this together. ``adapters``: room for low-rank adapters; None: there are none.

    Raises:
        parallel.communicators.base.CollectiveError: another shard is lost.
    """
    kernels = library.load() if model.device.type == "cpu" else None
    began = time.monotonic()
    proven: _Proven | None = None
    reason = ", they are off at another worker, or others"
    if kernels is not None:
        try:
            proven = _prove(kernels, model, block_size)
        except _Off as found:
            reason = str(found)
    if not _all_have(model, kernels.key if kernels is not None and proven is not None else None):
        if kernels is not None:
            logger.info("native kernels: off%s", reason)
        return None
    assert kernels is not None
    assert proven is not None
    samples = _run_model(model, block_size)
    program = _lay_out(kernels, proven.decoder, model, adapters)
    if not _all_have(model, kernels.key if program is not None else None):
        return None
    assert program is not None
    difference = _difference(program, model, block_size, samples)
    if not _all_have(model, kernels.key if difference <= proven.tolerance else None):
        differ = f"differ by {difference:.2g}" if model.stage.shard.is_last else "of the last stage differ"
        logger.info("native kernels: off for this model: results %s", differ)
        return None
    if model.experts is not None:
        program.spread()
    let_go_of_weights(model, proven.decoder)
    said = f", with {KINDS[program.kind].title}"
    if saved := program.saved_bytes:
        share = saved / (program.weight_bytes + saved)
        said += f", weights compressed by {100 * share:.0f} %"
    if codes := program.quantized_bytes:
        said += f", {100 * codes / program.weight_bytes:.0f} % of the weights' bytes are packed"
    if program.half_bytes:
        said += ", weights in float16"
    logger.info("native kernels: on%s (prepared in %.1f s)", said, time.monotonic() - began)
    return program


def _ranks_of(model: LoadedModel) -> TensorRank | None:
    shard = model.stage.shard
    return TensorRank(shard.rank, shard.size, shard.ranks) if shard.size > 1 else None


def _all_have(model: LoadedModel, key: str | None) -> bool:
    """Whether all shards have kernels, and the ranks of a stage the same.

    ``key`` is None if this shard has none.
    """
    shard, mark = model.stage.shard, 0 if key is None else zlib.crc32(key.encode()) + 1
    if shard.ranks is not None:
        marks = [given for (given,) in shard.ranks.all_gather_ints([mark])]
        mark = mark if marks == [mark] * len(marks) else 0
    if shard.stages is not None:
        return all(given for (given,) in shard.stages.all_gather_ints([mark]))
    return mark != 0


class _Proven(NamedTuple):
    """A model whose code the kernels can stand in for."""

    decoder: DecoderModel
    tolerance: float
    """Largest relative difference that the model's logits may have."""


def _prove(kernels: library.KernelLibrary, model: LoadedModel, block_size: int) -> _Proven:
    """Try the kernels on a copy of the model.

    Raises:
        _Off: the kernels do not know it, compute something else, or have no room.
    """
    decoder = _decoder_of(model, block_size)
    with _off_by_any_error():
        verdict = judge(kernels, model, decoder)
    if verdict.objection is not None:
        raise _Off(f" for this model: {verdict.objection}")
    if model.dtype == torch.float32:
        return _Proven(decoder, FLOAT32_TOLERANCE)
    return _Proven(decoder, ROUNDINGS * verdict.rounding * model.stage.shard.num_stages)


@contextmanager
def _off_by_any_error() -> Iterator[None]:
    """Turn any error inside into :class:`_Off`: a model's code may raise anything."""
    try:
        yield
    except NotRecognised as reason:
        raise _Off(f" for this model: {reason}") from reason
    except Exception as error:
        logger.debug("the trial of the native kernels failed", exc_info=True)
        raise _Off(f" for this model, on which they fail: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _lay_out(
    kernels: library.KernelLibrary, decoder: DecoderModel, model: LoadedModel, adapters: AdapterRoom | None
) -> Program | None:
    """The program of the model's own weights; None, and logged, without room for it."""
    try:
        return Program(kernels, decoder, model.experts, _ranks_of(model), adapters)
    except Exception as error:  # noqa: BLE001 (whatever it is, torch can compute this model)
        logger.info("native kernels: off, the weights cannot be laid out: %s", _in_one_line(error))
        return None


def _decoder_of(model: LoadedModel, block_size: int) -> DecoderModel:
    """The model as the kernels know it.

    Raises:
        _Off: the kernels do not know it, or have no room.
    """
    if not NativeCache.fits(block_size):
        raise _Off(f", --block-size {block_size} is not a multiple of 16")
    with _off_by_any_error():
        decoder = recognise(model.module, model.layers, model.dtype)
    needed, free = decoder.num_bytes * model.stage.shard.neighbours, available_memory()
    if decoder.states and NATIVE_GRID % block_size:
        raise _Off(f", --block-size {block_size} does not divide the {NATIVE_GRID} tokens of states' grid")
    if needed > free * (1 - MARGIN):
        sizes = f"{needed / 2**30:.1f} GiB of weights are laid out anew, and {free / 2**30:.1f} GiB are free"
        raise _Off(f", {sizes}; steps run on torch's own operators")
    return decoder


class _Sample(NamedTuple):
    """A step as the model's own modules compute it."""

    rows: list[tuple[int, int, int]]
    """As in :data:`STEPS`."""
    packed: PackedRows
    ids: Int64s
    expected: torch.Tensor | None
    """Logits [tokens, tokens of the vocabulary here]; none before the last stage."""


def _run_model(model: LoadedModel, block_size: int) -> list[_Sample]:
    """A few steps of two requests, through all stages."""
    cache = TorchPagedAttention(
        model.layers, num_blocks=8, block_size=block_size, dtype=model.dtype, device=model.device
    )
    samples = []
    with torch.inference_mode():
        for rows in STEPS:
            starts = np.array([start for _, start, _ in rows])
            counts = np.array([count for _, _, count in rows])
            positions = np.concatenate([np.arange(start, start + count) for _, start, count in rows])
            requests = [request for request, _, _ in rows]
            packed = PackedRows(starts, counts, TABLES[requests], positions, int((counts == 1).sum()))
            ids = (positions * 7919 + np.repeat(requests, counts) * 13) % model.vocab_size
            with _states_of(model, rows):
                given = model.stage.forward(
                    model.module,
                    _received(model, len(ids)),
                    input_ids=torch.from_numpy(ids).unsqueeze(0),
                    position_ids=torch.from_numpy(positions).unsqueeze(0),
                    use_cache=False,
                    **{PLAN_KEYWORD: cache.plan(packed)},
                )
            samples.append(_Sample(rows, packed, ids, _send_on(model, given)))
    if model.states is not None:
        model.states.running.clear()
    return samples


def _states_of(model: LoadedModel, rows: list[tuple[int, int, int]]) -> AbstractContextManager[None]:
    """Context in which modules with a recurrent state compute these rows."""
    if model.states is None:
        return nullcontext()
    requests, starts, counts = zip(*rows, strict=True)
    return model.states.step(StateRows(requests, starts, counts))


def _received(model: LoadedModel, tokens: int) -> torch.Tensor | None:
    """Hidden states [1, tokens, hidden] of the previous stage."""
    shard = model.stage.shard
    if shard.stages is None or shard.is_first:
        return None
    return shard.stages.receive(torch.empty(1, tokens, model.hidden_size, dtype=model.dtype), shard.stage - 1)


def _send_on(model: LoadedModel, given: torch.Tensor) -> torch.Tensor | None:
    """Send hidden states to the next stage; the last one keeps them as logits."""
    shard = model.stage.shard
    if shard.stages is None or shard.is_last:
        return given.float()
    shard.stages.send(given.to(model.dtype), shard.stage + 1)
    return None


def _difference(program: Program, model: LoadedModel, block_size: int, samples: list[_Sample]) -> float:
    """Difference of a token's logits from the model's, relative to their variation.

    Median over tokens. 0 before the last stage.
    """
    program.use(NativeCache(program.cached, num_blocks=8, block_size=block_size, dtype=model.dtype))
    program.allocate_states(SLOTS, 0)
    differences = [torch.zeros(1)]
    with torch.inference_mode():
        for sample in samples:
            found, expected = _send_on(model, _computed(program, model, sample)), sample.expected
            if found is not None and expected is not None:
                spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
                differences.append((found - expected).norm(dim=-1) / spread.clamp(min=1e-6))
    return float(torch.cat(differences[1:] or differences).median())


def _computed(program: Program, model: LoadedModel, sample: _Sample) -> torch.Tensor:
    """The program's result for a step.

    If it fails, the result is NaN, since other stages wait for one.
    """
    ids = sample.ids
    received = _received(model, len(ids))
    try:
        with program.alone(sample.rows):
            return program.forward(sample.packed, ids, np.arange(len(ids)), received)
    except CollectiveError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever it is, torch can compute this model)
        logger.info("native kernels: they fail on this model: %s", _in_one_line(error))
        last = model.stage.shard.is_last
        shape = (len(ids), 1) if last else (1, len(ids), model.hidden_size)
        return torch.full(shape, torch.nan, dtype=torch.float32 if last else model.dtype)


def _is_spread(weight: torch.Tensor, model: LoadedModel) -> bool:
    """Whether a tensor has experts that are spread, and held now."""
    return any(weight is each for layer in model.expert_layers for each in layer.parameters())


def let_go_of_weights(model: LoadedModel, decoder: DecoderModel) -> None:
    """Empty the model's layers and the decoder's parts: the program has its own copy.

    Spread experts stay: a change of the placement may assign them anew. It may give modules other ones
    meanwhile, so they are looked up each time.
    """
    base = getattr(model.module, model.module.base_model_prefix)
    names = base_parts(base)
    embedding = getattr(getattr(base, names["embedding"]), "weight", None)
    laid_out = (getattr(base, names[role]) for role in ("layers", "projection") if role in names)
    for part in (*laid_out, model.module.lm_head):
        for weight in part.parameters():
            if weight is not embedding and not _is_spread(weight, model):
                weight.data = weight.data.new_empty(0)
                forget_codes(weight)
    for weight in (each for layer in decoder.layers for each in layer.matrices()):
        if not _is_spread(weight, model):
            weight.data = weight.data.new_empty(0)
