"""Reads a causal language model of transformers and checks it before it serves.

The model code is transformers' own; what is ours is that its attention goes through ``engine.attention``. A
model that would not be computed correctly is refused here, by name of what is missing, instead of served
wrong.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations import accelerate
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from engine.attention.base import IMPLEMENTATION, PLAN_KEYWORD, LayerShape, paged_attention
from engine.attention.kv_codes import KVCodes
from engine.config import ModelConfig
from engine.gpu.fused_layers import fuse_layers
from engine.gpu.late_rotary import turn_late
from engine.gpu.product_choice import has_triton, reads_codes
from engine.host.deferred import run_deferred
from engine.model.checkpoint import CheckpointError, ModelInfo, format_of_weights, is_laid_out_as_usual
from engine.model.coded_layers import CodedLayers, held_by, keep_weights_packed
from engine.model.cut_check import check, share_run
from engine.model.expert_weights import ExpertShare, expert_modules, only_experts_of
from engine.model.experts_function import choose_experts_function
from engine.model.model_sources import (
    ENCODER,
    LAYER_TYPES,
    is_known,
    why_another_head,
    why_layers_unsupported,
    why_no_language_model,
)
from engine.model.probe import NOT_THROUGH_INTERFACE, probe_layers, verify
from engine.model.quantization.attached import attach_codes
from engine.model.quantization.formats import online_format
from engine.model.quantization.layers import round_inputs
from engine.model.quantization.view import log_format
from engine.model.shard import WHOLE, Shard, ShardedClass, Stage, sharded_class
from engine.model.shard_weights import all_tensors, random_shard, read_shard
from engine.model.text_parts import NAMES, OTHER_MODALITIES, class_with_head
from engine.model.uncut import UncutRun, uncut_run
from engine.model.weight_files import open_weights
from parallel.expert_parallel import ATTRIBUTE as EXPERTS_ATTRIBUTE
from parallel.expert_parallel import LAYER_ATTRIBUTE, Dispatch, ExpertParallel, expert_forward
from parallel.placement import assign_experts
from parallel.sliced_experts import SlicedExpertParallel
from parallel.tensor_parallel import TensorRank

logger = logging.getLogger(__name__)

HARMLESS_TENSORS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
"""Buffers that old versions of transformers saved and the model computes by itself."""
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
_LOADING = threading.Lock()
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
    """The expert layers' common part, when they are spread over instances."""
    expert_layers: tuple[Any, ...] = ()
    """Modules of the expert layers, in the order in which a step passes them."""
    stage: Stage = WHOLE_STAGE
    """Which part of the model this is."""
    context_length: int = 1 << 14
    """Positions of the longest request that is served."""

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
) -> LoadedModel:
    """Read a checkpoint or make random weights, and find out what the layers cache.

    With ``share``, only those experts are read, and the others are reached by ``dispatch``. With ``shard``,
    only that part of the model is; then all workers of a stage must run the model for the first time
    together: ``before_first_run`` returns when they do.

    Raises:
        CheckpointError: it cannot be served; the message names what is missing.
    """
    read = _twice(lambda: _read_model(info, settings, dtype, device, share, dispatch, shard))
    before_first_run()
    if shard.is_whole:
        return _twice(lambda: _run_first(read, info, settings, dtype, device))
    return _run_first(read, info, settings, dtype, device)  # other workers run with it and do not begin again


def _twice(load: Callable[[], Loaded]) -> Loaded:
    """Load, and load again if that fails.

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
) -> _ReadModel:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    config = _read_config(info, settings)
    model_class, config, is_part = _model_class(info, config, settings.trust_remote_code)
    _check_supported(info, config, model_class)
    _take_quantization_out(info, settings, config)
    dummy = settings.load_format == "dummy"
    if dummy and share is not None:
        raise CheckpointError("--load-format dummy with -ep is not built: random experts would not be shared")
    sharded = None if shard.is_whole else sharded_class(model_class, config, shard, share)
    is_coded = not dummy and reads_codes(device) and _is_quantised(info, settings)
    place = torch.device("cpu") if is_coded else device
    try:
        if sharded is not None:
            with _LOADING:
                module = _read_shard(info, settings, sharded, config, dtype, place, is_part)
        elif dummy:
            module = _make_dummy(model_class, config, dtype, device)
        else:
            module = _read_weights(info, settings, model_class, config, dtype, place, is_part, share)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # whatever the checkpoint may do to transformers' code
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            raise CheckpointError(f"{info.architecture}: {NOT_THROUGH_INTERFACE}") from error
        raise CheckpointError(
            f"{info.architecture}: transformers cannot load {info.directory}: {_first_line(error)}"
        ) from error
    coded = CodedLayers()
    if is_coded:
        coded = keep_weights_packed(module, device, experts=share is None and sharded is None)
    module = module.to(device).eval().requires_grad_(False)
    experts, expert_layers = None, ()
    if share is not None:
        experts, expert_layers = _spread_experts(module, share, dispatch, shard)
    elif sharded is not None and sharded.done.whole_experts:
        placement = assign_experts(info.num_experts, shard.size, "linear")
        _spread_experts(module, ExpertShare(placement, shard.rank), dispatch, WHOLE)
    elif module._can_set_experts_implementation():
        module.set_experts_implementation(choose_experts_function(module))
    if round_inputs(module) and share is None:
        sum_experts_in_order(module)
    if device.type == "cuda" and has_triton():
        fuse_layers(module, coded.merged)
        turn_late(module, PLAN_KEYWORD)
    with _LOADING:  # angles are computed in torch's default type, which is another one while a model is made
        _fix_rope_scaling(module, _longest(info, settings))
    if sharded is None:
        return _ReadModel(module, experts, expert_layers, WHOLE_STAGE, None)
    uncut = None
    if shard.is_last and shard.rank == 0 and not dummy:
        with _LOADING:
            uncut = _run_uncut(info, settings, sharded, config, dtype, device, is_part)
    stage = sharded.stage_of(module)
    return _ReadModel(module, experts, expert_layers, stage, sharded.vocab_size, sharded, uncut)


def _is_quantised(info: ModelInfo, settings: ModelConfig) -> bool:
    return settings.online is not None or format_of_weights(Path(info.directory)) is not None


def _longest(info: ModelInfo, settings: ModelConfig) -> int:
    """Tokens of the longest request that is served."""
    wanted = settings.max_model_len or -1
    return wanted if wanted > 0 else info.context_length


def _run_uncut(
    info: ModelInfo,
    settings: ModelConfig,
    sharded: ShardedClass,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    is_part: bool,
) -> UncutRun:
    """Results that the cut model is checked against.

    Raises:
        CheckpointError: its layers cannot be computed one by one.
    """

    def load(part: ShardedClass) -> Any:
        module = _read_shard(info, settings, part, config, dtype, device, is_part)
        module = module.to(device).eval().requires_grad_(False)
        if module._can_set_experts_implementation():
            module.set_experts_implementation(choose_experts_function(module))
        if round_inputs(module):
            sum_experts_in_order(module)
        _fix_rope_scaling(module, _longest(info, settings))
        return module

    try:
        return uncut_run(sharded, load, device)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # whatever layers of some family need that a few of them lack
        raise CheckpointError(
            f"{info.architecture}: a few of its layers cannot be computed without the others, so that -tp "
            f"and -pp cannot be checked: use -tp 1 -pp 1. {type(error).__name__}: {_first_line(error)}"
        ) from error


def _run_first(
    read: _ReadModel, info: ModelInfo, settings: ModelConfig, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    """Find out what the layers cache, and check that they compute what they should."""
    module, stage, name = read.module, read.stage, info.architecture
    with torch.inference_mode():
        width, layers = probe_layers(module, name, info.context_length, stage)
        vocab_size = width if read.vocab_size is None else read.vocab_size
        if settings.load_format != "dummy":
            verify(module, name, layers, vocab_size, dtype, stage)
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
    )


def _spread_experts(
    module: Any, share: ExpertShare, dispatch: Dispatch, shard: Shard
) -> tuple[ExpertParallel, tuple[Any, ...]]:
    """Let the expert layers go through one :class:`ExpertParallel`.

    Each tensor-parallel rank of the shard dispatches its slice of the tokens.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, expert_forward)
    local_experts = ALL_EXPERTS_FUNCTIONS[choose_experts_function(module)]
    layers = tuple(expert_modules(module).values())
    facts = share.placement, share.rank, dispatch, local_experts
    if shard.size > 1:
        ranks = TensorRank(shard.rank, shard.size, shard.ranks)
        experts: ExpertParallel = SlicedExpertParallel(*facts, ranks, max(1, len(layers)))
    else:
        experts = ExpertParallel(*facts, max(1, len(layers)))
    for number, layer in enumerate(layers):
        setattr(layer, EXPERTS_ATTRIBUTE, experts)
        setattr(layer, LAYER_ATTRIBUTE, number)
    module.set_experts_implementation(IMPLEMENTATION)
    return experts, layers


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


def _read_config(info: ModelInfo, settings: ModelConfig) -> Any:
    own_code = settings.trust_remote_code and not is_known(info.model_type)
    try:
        return AutoConfig.from_pretrained(info.directory, trust_remote_code=own_code, local_files_only=True)
    except Exception as error:  # whatever its config.json may do to transformers' code
        raise CheckpointError(
            f"{info.architecture}: this version of transformers has no model type {info.model_type!r} "
            f"(or cannot read its config.json). Upgrade transformers, or pass --trust-remote-code if the "
            f"checkpoint brings its own code. transformers says: {_first_line(error)}"
        ) from error


def _model_class(info: ModelInfo, config: Any, trust_remote_code: bool) -> tuple[Any, Any, bool]:
    """The class to load, its config, and whether it is a larger model's language part.

    The code of a checkpoint is run only where transformers has none for its family.
    """
    text_config = config.get_text_config(decoder=True)
    is_part = text_config is not config
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    if found is None and is_part:
        found = class_with_head(text_config, config.model_type)
    brings_code = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    if found is None and brings_code and trust_remote_code:
        return AutoModelForCausalLM, config, False
    if found is None:
        raise CheckpointError(f"{info.architecture} {why_no_language_model(text_config.model_type)}")
    if brings_code and trust_remote_code:
        logger.info(
            "--trust-remote-code: %s is transformers' own, the checkpoint's is not run", found.__name__
        )
    if is_part:
        text_config.tie_word_embeddings = config.tie_word_embeddings
    elif problem := why_another_head(info.architecture, found.__name__):
        raise CheckpointError(f"{info.architecture} {problem}")
    return found, text_config, is_part


def _check_supported(info: ModelInfo, config: Any, model_class: Any) -> None:
    name = info.architecture
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name} {ENCODER}")
    types = {each for field in LAYER_TYPES for each in getattr(config, field, None) or ()}
    is_stateful = getattr(model_class, "_is_stateful", False)
    if problem := why_layers_unsupported(types, is_stateful):
        raise CheckpointError(f"{name} {problem}")


def _take_quantization_out(info: ModelInfo, settings: ModelConfig, config: Any) -> None:
    """Let transformers see plain weights, where quantised ones are widened while they are read."""
    form = format_of_weights(Path(info.directory))
    if form is None:
        if settings.online is not None:
            log_format(online_format(settings.online))
        return
    log_format(form)
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def _make_dummy(model_class: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Draw random weights on the device where they are to be.

    A host would take minutes for those of a large model, and hold them all.
    """
    there = contextlib.nullcontext() if device.type == "cpu" else device
    devices = [device] if device.type == "cuda" else []
    with there, torch.random.fork_rng(devices=devices):  # all instances make the same weights
        torch.manual_seed(0)
        options = {"dtype": dtype, "attn_implementation": IMPLEMENTATION}
        if model_class is AutoModelForCausalLM:
            return model_class.from_config(config, trust_remote_code=True, **options)
        return model_class._from_config(config, **options)


def _read_weights(
    info: ModelInfo,
    settings: ModelConfig,
    model_class: Any,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    is_part: bool,
    share: ExpertShare | None,
) -> Any:
    options = _load_options(model_class, config, dtype, device, is_part)
    directory = Path(info.directory)
    is_plain = format_of_weights(directory) is None and settings.online is None
    finds_files = is_laid_out_as_usual(directory) or model_class is AutoModelForCausalLM
    if share is None and is_plain and finds_files:
        with _straight_to(device):
            module, report = model_class.from_pretrained(
                info.directory, use_safetensors=True, local_files_only=True, **options
            )
        _check_report(info, report, is_part)
        return module
    with open_weights(directory, dtype, settings.online) as files, _straight_to(device):
        if share is not None:
            with only_experts_of(model_class, config, share, files) as tensors:
                module, report = model_class.from_pretrained(None, state_dict=tensors, **options)
        else:
            module, report = model_class.from_pretrained(None, state_dict=all_tensors(files), **options)
    _check_report(info, report, is_part)
    attach_codes(module, files, options.get("key_mapping"))
    return module


def _read_shard(
    info: ModelInfo,
    settings: ModelConfig,
    sharded: ShardedClass,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    is_part: bool,
) -> Any:
    options = _load_options(sharded.model_class, config, dtype, device, is_part)
    if settings.load_format == "dummy":
        with _straight_to(device):
            module, _ = sharded.model_class.from_pretrained(None, state_dict=random_shard(sharded), **options)
        return module
    with open_weights(Path(info.directory), dtype, settings.online) as files:
        tensors = read_shard(sharded, files, options.get("key_mapping"), device)
    with _straight_to(device):
        module, report = sharded.model_class.from_pretrained(None, state_dict=tensors, **options)
    _check_report(info, report, is_part)
    attach_codes(module, files, options.get("key_mapping"))
    return module


@contextlib.contextmanager
def _straight_to(device: torch.device) -> Iterator[None]:
    """Let transformers read tensor by tensor to one device other than the CPU.

    It asks for the package accelerate then, and needs it only for several devices.
    """
    with contextlib.ExitStack() as undo:
        if device.type != "cpu":
            before = accelerate.is_accelerate_available
            undo.callback(setattr, accelerate, "is_accelerate_available", before)
            accelerate.is_accelerate_available = lambda: True
        yield


def _load_options(
    model_class: Any, config: Any, dtype: torch.dtype, device: torch.device, is_part: bool
) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": True} if model_class is AutoModelForCausalLM else {}
    if device.type != "cpu":
        options["device_map"] = {"": device}
    if is_part:
        options["key_mapping"] = NAMES
    options["ignore_mismatched_sizes"] = True  # _check_report names them; transformers would not
    return options | {
        "config": config,
        "dtype": dtype,
        "attn_implementation": IMPLEMENTATION,
        "output_loading_info": True,
    }


def _check_report(info: ModelInfo, report: dict[str, Any], is_part: bool) -> None:
    """Refuse missing tensors, those of another shape, and those that the model does not know."""
    if other := sorted(report["mismatched_keys"], key=str):
        name, found, wanted = other[0]
        raise CheckpointError(
            f"{info.architecture}: {info.directory} has {len(other)} tensor(s) of another shape than its "
            f"config.json says: {name} is {list(found)}, not {list(wanted)}"
        )
    unexpected = [key for key in report["unexpected_keys"] if not HARMLESS_TENSORS.search(key)]
    if is_part:
        unexpected = [key for key in unexpected if not OTHER_MODALITIES.search(key)]
    for keys, problem in (
        (report["missing_keys"], "lacks {} tensor(s) that this model needs"),
        (unexpected, "has {} tensor(s) that this model does not know"),
    ):
        if keys:
            names = ", ".join(sorted(keys)[:3]) + (" ..." if len(keys) > 3 else "")
            raise CheckpointError(
                f"{info.architecture}: {info.directory} {problem.format(len(keys))}: {names}"
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


def _first_line(error: BaseException) -> str:
    """First line of an error; with the second where the first one promises it."""
    text = re.sub(r":\n\s*", ": ", str(error).strip(), count=1)
    return text.split("\n", 1)[0][:300] or type(error).__name__
