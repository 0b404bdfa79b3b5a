"""Reads a causal language model of transformers and checks it before it serves.

The model code is transformers' own; what is ours is that its attention goes through ``engine.attention``. A
model that would not be computed correctly is refused here, by name of what is missing, instead of served
wrong.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import AttentionInterface
from transformers.utils import logging as transformers_logging

from engine.attention.base import IMPLEMENTATION, PLAN_KEYWORD, LayerShape, paged_attention
from engine.attention.current_call import follow_calls
from engine.attention.indexers import UnknownIndexer, choose_over_pages
from engine.attention.kv_codes import KVCodes
from engine.attention.own_attention import adapt
from engine.attention.temperature import scale_by_position
from engine.config import ModelConfig
from engine.gpu.few_rows import fuse_few_rows
from engine.gpu.fused_layers import fuse_layers
from engine.gpu.late_rotary import turn_late
from engine.gpu.product_choice import has_triton, reads_codes
from engine.host.deferred import run_deferred
from engine.host.memory import MARGIN, available_memory
from engine.host.shared_tensors import ALIGNMENT, join, share
from engine.model.checkpoint import CheckpointError, ModelInfo, ReadingStopped
from engine.model.coded_layers import CodedLayers, held_by, keep_weights_packed
from engine.model.errors import first_line
from engine.model.expert_weights import ExpertShare
from engine.model.experts_function import choose_experts_function, spread_experts, sum_experts_in_order
from engine.model.model_class import class_of
from engine.model.model_sources import NOT_THROUGH_INTERFACE
from engine.model.module_reading import ModuleReader
from engine.model.probe import probe_layers, verify
from engine.model.quantization.layers import round_inputs
from engine.model.sharding.cut_check import check, share_run
from engine.model.sharding.shard import WHOLE, Shard, ShardedClass, Stage, sharded_class
from engine.model.sharding.uncut import UncutRun, uncut_run
from engine.states.layers import LostState, StateLayers, compute_on_grid
from parallel.expert_parallel import Dispatch, ExpertParallel
from parallel.placement import assign_experts

logger = logging.getLogger(__name__)

TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k",
)
"""Names that configurations have for the number of experts of a token."""
LOADING = threading.RLock()
"""Lets workers in one process load one by one.

transformers changes global state while it makes a model.
"""

WHOLE_STAGE = Stage(WHOLE, range(0))

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run packed steps."""

    module: Any
    """The transformers model, in evaluation mode."""
    layers: tuple[LayerShape, ...]
    vocab_size: int
    """Width of the logits, over all tensor-parallel ranks."""
    dtype: torch.dtype
    device: torch.device
    experts: ExpertParallel | None = None
    """Common part of the expert layers, when experts are spread over instances."""
    expert_layers: tuple[Any, ...] = ()
    """Modules of the expert layers, in the order in which a step passes them."""
    stage: Stage = WHOLE_STAGE
    """Stage and rank that this model is of the whole one."""
    context_length: int = 1 << 14
    """Positions of the longest request that is served."""
    states: StateLayers | None = None
    """Layers with a recurrent state; None: the model has none."""
    sharded: ShardedClass | None = None
    """How the model is cut; None: it is whole."""

    @property
    def hidden_size(self) -> int:
        return int(self.module.config.get_text_config().hidden_size)

    @property
    def experts_per_token(self) -> int:
        """Experts that the router chooses for each token."""
        config = self.module.config.get_text_config()
        return next(int(getattr(config, name)) for name in TOP_K if getattr(config, name, None) is not None)

    @property
    def num_parameters(self) -> int:
        return held_by(self.module.parameters())[0]

    @property
    def weight_bytes(self) -> int:
        return held_by(self.module.parameters())[1]

    def kv_bytes_per_token(self, codes: KVCodes | None = None) -> int:
        """Bytes of a token in the KV cache, with numbers or with codes."""
        return sum(layer.bytes_per_token(self.dtype, codes) for layer in self.layers)


def load_model(
    info: ModelInfo,
    settings: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    share: ExpertShare | None = None,
    dispatch: Dispatch = "allgather_reducescatter",
    shard: Shard = WHOLE,
    before_first_run: Callable[[], None] = lambda: None,
    reader_class: type[ModuleReader] = ModuleReader,
) -> LoadedModel:
    """Read a checkpoint or make random weights, and find out what the layers cache.

    With ``share``, only those experts are read, and the others are reached by ``dispatch``. With ``shard``,
    only that part of the model is; then all workers of a stage must run the model for the first time
    together: ``before_first_run`` returns when they do.
    ``reader_class``: what of the checkpoint is read, and as what.

    Raises:
        CheckpointError: it cannot be served; the message names what is missing.
    """
    read = _twice(lambda: _read_model(info, settings, dtype, device, share, dispatch, shard, reader_class))
    before_first_run()
    if shard.is_whole:
        return _twice(lambda: _run_first(read, info, settings, dtype, device))
    return _run_first(read, info, settings, dtype, device)  # other workers run with it and do not begin again


def align(module: Any, sharers: int = 1, promised: int = 0) -> bool:
    """Move weights that torch computes with to where it puts new ones.

    Returns whether all of them are there now.
    Those of a mapped file begin elsewhere, and the last bits of its products depend on that. So they would
    be others after an update, or with a file that has another header. Processes of one host share a copy,
    which takes the place of pages that the system may drop; without free memory they stay.
    ``sharers``: processes with others that do so at once, each of which will take so many bytes that it was
    ``promised``.
    """
    needed = bytes_to_align(module, sharers, promised)
    if (tensors := _misaligned(module)) and not needed:
        logger.warning("torch computes with the mapped checkpoint: no memory is free for copies")
        return False
    try:
        share([each for each in tensors if each.is_contiguous()])
    except OSError as error:
        logger.warning("each instance of this host has weights of its own: %s", error)
    for tensor in _misaligned(module):
        tensor.data = tensor.data.clone()
    return True


def share_again(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors that were read anew to a copy that processes of one host share.

    Those in private memory leave it one by one, so that this takes hardly more.
    """
    by_place: dict[tuple[int, int], list[torch.Tensor]] = {}
    for each in tensors:
        if not each.is_cuda and each.is_contiguous() and each.nbytes:
            by_place.setdefault((each.data_ptr(), each.nbytes), []).append(each)
        elif not each.is_cuda and 0 not in each.stride():  # no part of it stays in another version's file
            each.data = each.data.clone()
    try:
        share([same[0] for same in by_place.values()])
    except OSError as error:
        logger.warning("each instance of this host has weights of its own: %s", error)
    for first, *others in by_place.values():
        for each in others:
            each.data = first.data.view(-1).view(torch.uint8).view(each.dtype).view(each.shape)


def bytes_to_align(module: Any, sharers: int = 1, promised: int = 0) -> int:
    """Bytes that :func:`align` takes in each process; 0 where so many are not free.

    What another process of this host has is taken here already. It would be gone later if that one ended
    meanwhile, and nobody would have kept memory for it.
    """
    if together := [each for each in _misaligned(module) if each.is_contiguous()]:
        with contextlib.suppress(OSError):  # it is no help to look for them then
            join(together)
    needed = sum(each.nbytes for each in _misaligned(module))
    return needed if sharers * (needed + promised) <= available_memory() * (1 - MARGIN) else 0


def _misaligned(module: Any) -> list[torch.Tensor]:
    found = (*module.parameters(), *module.buffers())
    return [each for each in found if not each.is_cuda and each.data_ptr() % ALIGNMENT]


def _twice(load: Callable[[], Loaded]) -> Loaded:
    """Load a model, once more if deferred modules were missing.

    The first time, a deferred part of the libraries may have been missing.
    """
    try:
        return load()
    except (CheckpointError, RuntimeError):
        if not run_deferred():
            raise
        return load()


@dataclass(frozen=True)
class _ReadModel:
    """A model that has its weights and has not run yet."""

    module: Any
    states: StateLayers | None
    experts: ExpertParallel | None
    expert_layers: tuple[Any, ...]
    stage: Stage
    vocab_size: int | None
    """Width of the logits over all ranks; None: the width of the model's output."""
    sharded: ShardedClass | None = None
    uncut: UncutRun | None = None
    """Results of a few uncut layers, on the worker that reads them.

    That is one worker of a cut model.
    """


def _read_model(
    info: ModelInfo,
    settings: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    share: ExpertShare | None,
    dispatch: Dispatch,
    shard: Shard,
    reader_class: type[ModuleReader],
) -> _ReadModel:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    reader = reader_class(info, settings, *class_of(info, settings), dtype)
    if reader.is_dummy and share is not None:
        raise CheckpointError("--load-format dummy with -ep is not built: random experts would not be shared")
    sharded = None
    if not shard.is_whole:
        sharded = sharded_class(
            reader.model_class, reader.config, shard, share, whole_states=device.type == "cpu"
        )
    is_coded = not reader.is_dummy and reads_codes(device) and reader.is_quantised
    module = read_module(reader, sharded, share, device, torch.device("cpu") if is_coded else device)
    coded = CodedLayers()
    if is_coded:
        coded = keep_weights_packed(module, device, experts=share is None and sharded is None)
    module = module.to(device).eval().requires_grad_(False)
    experts, expert_layers = None, ()
    if share is not None:
        experts, expert_layers = spread_experts(module, share, dispatch, shard)
    elif sharded is not None and sharded.done.whole_experts:
        placement = assign_experts(info.num_experts, shard.size, "linear")
        spread_experts(module, ExpertShare(placement, shard.rank), dispatch, WHOLE)
    elif module._can_set_experts_implementation():
        module.set_experts_implementation(choose_experts_function(module))
    if round_inputs(module) and share is None:
        sum_experts_in_order(module)
    if device.type == "cuda" and has_triton():
        fused = fuse_layers(module, coded.merged)
        if sharded is None:
            fuse_few_rows(module, fused.merged, experts=share is None)
        turn_late(module, PLAN_KEYWORD)
    with LOADING:  # angles are computed in torch's default type, which is another one while a model is made
        _fix_rope_scaling(module, _longest(info, settings))
    states = compute_on_grid(module)
    scale_by_position(module)
    try:
        choose_over_pages(module, _longest(info, settings))
    except UnknownIndexer as error:
        raise CheckpointError(f"{info.architecture} chooses keys by {error}, which is not built") from error
    follow_calls(module, PLAN_KEYWORD)
    adapt(module, IMPLEMENTATION)
    if sharded is None:
        return _ReadModel(module, states, experts, expert_layers, WHOLE_STAGE, None)
    uncut = None
    if shard.is_last and shard.rank == 0 and not reader.is_dummy:
        with LOADING:
            uncut = _run_uncut(reader, sharded, device)
    stage = sharded.stage_of(module)
    return _ReadModel(module, states, experts, expert_layers, stage, sharded.vocab_size, sharded, uncut)


def read_module(
    reader: ModuleReader,
    sharded: ShardedClass | None,
    share: ExpertShare | None,
    device: torch.device,
    place: torch.device,
) -> Any:
    """The module as transformers makes it; ``place``: where tensors are read to, before the device."""
    info = reader.info
    try:
        if sharded is not None:
            with LOADING:
                return reader.read_shard(sharded, place)
        return reader.make_dummy(device) if reader.is_dummy else reader.read(place, share)
    except (CheckpointError, MemoryError, ReadingStopped):
        raise
    except Exception as error:  # whatever the checkpoint may do to transformers' code
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            raise CheckpointError(f"{info.architecture}: {NOT_THROUGH_INTERFACE}") from error
        raise CheckpointError(
            f"{info.architecture}: transformers cannot load {info.directory}: {first_line(error)}"
        ) from error


def _longest(info: ModelInfo, settings: ModelConfig) -> int:
    """Tokens of the longest request that is served."""
    wanted = settings.max_model_len or -1
    return wanted if wanted > 0 else info.context_length


def _run_uncut(reader: ModuleReader, sharded: ShardedClass, device: torch.device) -> UncutRun:
    """Results that the cut model is checked against.

    Raises:
        CheckpointError: its layers cannot be computed one by one.
    """

    def load(part: ShardedClass) -> Any:
        module = reader.read_shard(part, device)
        module = module.to(device).eval().requires_grad_(False)
        if module._can_set_experts_implementation():
            module.set_experts_implementation(choose_experts_function(module))
        if round_inputs(module):
            sum_experts_in_order(module)
        adapt(module, IMPLEMENTATION)
        _fix_rope_scaling(module, _longest(reader.info, reader.settings))
        return module

    try:
        return uncut_run(sharded, load, device)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # whatever layers of some family need that a few of them lack
        raise CheckpointError(
            f"{reader.info.architecture}: a few of its layers cannot be computed without the others, so that "
            f"-tp and -pp cannot be checked: use -tp 1 -pp 1. {type(error).__name__}: {first_line(error)}"
        ) from error


def _run_first(
    read: _ReadModel, info: ModelInfo, settings: ModelConfig, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    """Probe what the layers cache, and compare their results with transformers'."""
    module, stage, name = read.module, read.stage, info.architecture
    with torch.inference_mode():
        width, layers = probe_layers(module, name, info.context_length, stage, read.states)
        if read.states is not None:
            try:
                read.states.settle(name)
            except LostState as error:
                raise CheckpointError(str(error)) from error
        vocab_size = width if read.vocab_size is None else read.vocab_size
        if settings.load_format != "dummy":
            verify(module, name, layers, vocab_size, dtype, stage, read.states)
            if read.sharded is not None:
                uncut = share_run(read.uncut, stage.shard)
                check(module, name, read.sharded, stage, uncut)
    return LoadedModel(
        module,
        layers,
        vocab_size,
        dtype,
        device,
        read.experts,
        read.expert_layers,
        stage,
        _longest(info, settings),
        read.states,
        read.sharded,
    )


def _fix_rope_scaling(module: Any, longest: int) -> None:
    """Choose length-dependent rotary frequencies once, for the longest request that is served.

    transformers chooses them in each call from the largest position in the batch, so that a request's
    numbers would depend on its neighbours. vLLM fixes them in the same way.
    """
    for rotary in module.modules():
        rope_types = getattr(rotary, "rope_type", None)
        if rope_types is None or not hasattr(rotary, "config"):
            continue
        by_layer_type = rope_types if isinstance(rope_types, dict) else {None: rope_types}
        changing = {
            key: kind for key, kind in by_layer_type.items() if kind == "longrope" or "dynamic" in kind
        }
        if not changing:
            continue
        device = next(rotary.buffers()).device
        for key in changing:
            options = {} if key is None else {"layer_type": key}
            rotary(torch.zeros(1, device=device), torch.tensor([[longest - 1]], device=device), **options)
        fixed = {key: "fixed" if key in changing else kind for key, kind in by_layer_type.items()}
        rotary.rope_type = fixed if isinstance(rope_types, dict) else fixed[None]
