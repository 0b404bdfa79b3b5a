"""Resolution of settings: from the user's wishes to what an instance runs with (no torch)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from coordinator.messages import AdapterList, Balancing, Lora, Settings
from engine.adapters.adapter_settings import settled
from engine.config import SHIPPED_MODEL, CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.config.expert_balancing import read_config
from engine.config.lora import LoraConfig
from engine.host.cores import has_gpu
from engine.model.checkpoint import (
    CheckpointError,
    ModelInfo,
    check_quantization,
    check_servable,
    chosen_dtype,
    fingerprint,
    read_model_info,
    why_experts_stay_whole,
)
from engine.model.finding import find_model
from engine.model.state_limits import check_states
from engine.model.weight_set import check_weights
from engine.pooling.detection import as_pooling, find_pooling
from engine.pooling.flags import check_flags, for_pooling
from engine.speculation.draft_source import find_draft, with_length_of_head
from parallel.pipeline_parallel import check_split
from parallel.placement import assign_experts
from parallel.topology import kv_heads_of

logger = logging.getLogger(__name__)


def resolve(
    config: EngineConfig, size: int | None = None, *, unread: bool = False
) -> tuple[ModelInfo, Settings]:
    """Find the model and settle every setting that depends on it.

    ``size`` is ``-dp``, if it was given. Without it, whether experts are spread is not known yet. ``unread``:
    adapters keep the digests that they have, if any.

    Raises:
        AdapterError: an adapter cannot be served.
        CheckpointError: the model is not there or cannot be served as asked.
    """
    model = config.model
    info = _find(config)
    check_states(config, info)
    find_draft(config, info)
    settings = Settings(
        model=_place(model.model, info) or SHIPPED_MODEL,
        revision=model.revision,
        served_model_name=model.served_model_name or (model.model or SHIPPED_MODEL,),
        fingerprint=fingerprint(info, weights=model.reads_weights),
        dtype=_dtype(config, info),
        max_model_len=_context_length(model.max_model_len, info),
        block_size=config.cache.block_size,
        kv_cache_dtype=config.cache.kv_codes or "auto",
        vocab_size=info.vocab_size,
        tensor_parallel_size=config.device.tensor_parallel_size,
        pipeline_parallel_size=config.device.pipeline_parallel_size,
        **_expert_settings(config, info, size),
        max_num_batched_tokens=config.scheduler.token_budget(has_gpu(config.device)),
        is_budget_given=config.scheduler.max_num_batched_tokens is not None,
        max_num_seqs=config.scheduler.most_requests(),
        performance_mode=config.scheduler.performance_mode,
        quantization=config.model.online or "",
        lora=_lora(config.lora, model.served_model_name or (model.model or SHIPPED_MODEL,), unread=unread),
        pooling=info.pooling,
    )
    scheduler = config.scheduler
    if not scheduler.enable_chunked_prefill and settings.max_num_batched_tokens < settings.max_model_len:
        raise CheckpointError(
            f"without chunked prefill a whole prompt must fit one step: raise --max-num-batched-tokens to "
            f"{settings.max_model_len}, lower --max-model-len, or leave chunked prefill on"
        )
    return info, settings


def _lora(config: LoraConfig, names: tuple[str, ...], *, unread: bool) -> Lora | None:
    """Adapters with their digests; None without any. ``names``: those of the model.

    Raises:
        AdapterError: one cannot be served.
    """
    if not config.enable_lora:
        return None
    for source in config.sources:
        if source.name in names:  # else its requests would be answered by the adapter
            raise CheckpointError(f"{source.name} is the model's own name: give the adapter another one")
    allowed = config.allowed_local_adapter_path
    return Lora(
        tuple(config.sources if unread else map(settled, config.sources)),
        config.max_loras,
        config.max_lora_rank,
        config.max_cpu_loras,
        str(Path(allowed).expanduser().absolute()) if allowed else "",
    )


def _place(model: str | None, info: ModelInfo) -> str | None:
    """Name of the model for other processes, which may run in another directory."""
    if not model or not Path(model).expanduser().exists():
        return model
    return info.directory if Path(model).expanduser().is_dir() else str(Path(model).expanduser().absolute())


def _dtype(config: EngineConfig, info: ModelInfo) -> str:
    chosen = chosen_dtype(config.model.dtype, info, on_cpu=not has_gpu(config.device))
    if chosen != info.dtype and config.model.dtype == "auto":
        logger.info(
            "a checkpoint in %s is computed in %s on this CPU; --dtype bfloat16 takes half the memory",
            info.dtype,
            chosen,
        )
    return chosen


def _find(config: EngineConfig) -> ModelInfo:
    """Facts of the model that settings depend on.

    What config.json rules out is refused before any weights are fetched or read.

    Raises:
        CheckpointError: the model is not there or cannot be served as asked.
    """
    model = config.model
    found: list[ModelInfo] = []

    def check(directory: Path) -> None:
        pooled = find_pooling(directory, config.pooling)
        if pooled is None:
            check_servable(directory, trust_remote_code=model.trust_remote_code)
        else:
            check_flags(config)
        check_quantization(directory, model.quantization, reads_weights=model.reads_weights)
        info = as_pooling(read_model_info(directory, weights=False), pooled)
        _check_sharding(config.device, info)
        _context_length(model.max_model_len, info)
        found.append(info)

    directory = find_model(model.model, model.revision, weights=model.reads_weights, check=check)
    if model.reads_weights:
        check_weights(directory)
    return found[-1]


def adopt(config: EngineConfig, settings: Settings) -> EngineConfig:
    """This instance's settings with all that the mesh shares taken from the mesh.

    Raises:
        CheckpointError: the instance's own flags do not go with them.
    """
    try:
        return _adopted(config, settings)
    except ValueError as error:
        raise CheckpointError(f"with the settings of the mesh: {error}") from error


def _adopted(config: EngineConfig, settings: Settings) -> EngineConfig:
    spreads = settings.enable_expert_parallel
    adopted = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(
            config.model,
            model=config.model.model or settings.model,
            revision=config.model.revision or settings.revision,
            served_model_name=settings.served_model_name,
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            quantization=settings.quantization or None,
        ),
        cache=msgspec.structs.replace(
            config.cache, block_size=settings.block_size, kv_cache_dtype=settings.kv_cache_dtype
        ),
        scheduler=_scheduler(config, settings),
        lora=_lora_config(settings.lora),
        device=msgspec.structs.replace(
            config.device,
            tensor_parallel_size=settings.tensor_parallel_size,
            pipeline_parallel_size=settings.pipeline_parallel_size,
            pipeline_split=(settings.pipeline_split if spreads else None) or config.device.pipeline_split,
            enable_expert_parallel=settings.enable_expert_parallel,
            expert_placement_strategy=settings.expert_placement_strategy,
            **_flags_of(settings.balancing if spreads else None),
            all2all_backend=settings.all2all_backend,
            mesh_transport=settings.mesh_transport,
        ),
    )
    return for_pooling(adopted, settings.pooling)


def with_adapters(settings: Settings, changed: AdapterList) -> Settings:
    """Settings with the adapters that a mesh serves now; ``changed``: its orders'."""
    if settings.lora is None or not changed.number:
        return settings
    lora = msgspec.structs.replace(settings.lora, adapters=changed.adapters)
    return msgspec.structs.replace(settings, lora=lora)


def _lora_config(lora: Lora | None) -> LoraConfig:
    """The mesh's adapters as flags name them."""
    if lora is None:
        return LoraConfig()
    modules = [msgspec.json.encode(each).decode() for each in lora.adapters]
    return LoraConfig(
        enable_lora=True,
        lora_modules=tuple(modules),
        max_loras=lora.max_loras,
        max_lora_rank=lora.max_lora_rank,
        max_cpu_loras=lora.max_cpu_loras,
        allowed_local_adapter_path=lora.allowed_path or None,
    )


def _scheduler(config: EngineConfig, settings: Settings) -> SchedulerConfig:
    """Limits of an instance: its own if it names a model, else the mesh's.

    They need not agree over instances. A budget that is the default on a CPU stays unset, since some limits
    of time hold for that one only.
    """
    scheduler, on_gpu = config.scheduler, has_gpu(config.device)
    if config.model.model is None:
        scheduler = msgspec.structs.replace(
            scheduler,
            max_num_batched_tokens=None,
            max_num_seqs=settings.max_num_seqs,
            performance_mode=settings.performance_mode,
        )
        budget = (
            settings.max_num_batched_tokens if settings.is_budget_given else scheduler.token_budget(on_gpu)
        )
    else:
        budget = scheduler.token_budget(on_gpu)
    if scheduler.max_num_batched_tokens is None and (on_gpu or budget != scheduler.token_budget()):
        scheduler = msgspec.structs.replace(scheduler, max_num_batched_tokens=budget)
    return with_length_of_head(scheduler)


def ignored_when_joining(config: EngineConfig) -> list[str]:
    """Flags without effect on an instance that takes its model from the mesh."""
    given = {
        "--dtype": config.model.dtype != ModelConfig().dtype,
        "--quantization": config.model.quantization is not None,
        "--max-model-len": config.model.max_model_len is not None,
        "--served-model-name": bool(config.model.served_model_name),
        "--block-size": config.cache.block_size != CacheConfig().block_size,
        "--kv-cache-dtype": config.cache.kv_cache_dtype != CacheConfig().kv_cache_dtype,
        "--max-num-seqs": config.scheduler.max_num_seqs != SchedulerConfig().max_num_seqs,
        "--performance-mode": config.scheduler.performance_mode != SchedulerConfig().performance_mode,
        "--max-num-batched-tokens": config.scheduler.max_num_batched_tokens is not None,
        "-tp": config.device.tensor_parallel_size != DeviceConfig().tensor_parallel_size,
        "-ep": config.device.enable_expert_parallel is not None,
        "--expert-placement-strategy": (
            config.device.expert_placement_strategy != DeviceConfig().expert_placement_strategy
        ),
        "--enable-eplb": config.device.enable_eplb,
        "--all2all-backend": config.device.all2all_backend != DeviceConfig().all2all_backend,
        "--mesh-transport": config.device.mesh_transport != DeviceConfig().mesh_transport,
        "-pp": config.device.pipeline_parallel_size != DeviceConfig().pipeline_parallel_size,
    }
    return [name for name, was_given in given.items() if was_given]


def _expert_settings(config: EngineConfig, info: ModelInfo, size: int | None) -> dict[str, Any]:
    """Settings of spread experts: whether and how experts are placed over instances.

    An instance without ``-dp`` takes the answer from the mesh, and is compared with the mesh in all other
    settings. So these do not depend on the size.
    """
    device = config.device
    spread = _spreads(config, info, size)
    if spread and device.all2all_backend == "nccl" and not has_gpu(device):
        raise CheckpointError("--all2all-backend nccl needs a GPU for each instance: use auto on CPUs")
    if size is not None and device.eplb is not None:
        _remark_on_balancing(device, info.num_experts, size * device.tensor_parallel_size, spreads=spread)
    return {
        "enable_expert_parallel": spread,
        "expert_placement_strategy": device.expert_placement_strategy,
        "all2all_backend": device.all2all_backend,
        "mesh_transport": device.mesh_transport,
        "data_parallel_size": size if spread else 0,
        "num_experts": info.num_experts if spread else 0,
        "balancing": None if device.eplb is None else device.eplb.balancing(device.eplb_survive),
        "pipeline_split": ",".join(map(str, device.split or ())),
    }


def _remark_on_balancing(device: DeviceConfig, num_experts: int, ranks: int, *, spreads: bool) -> None:
    """Log flags of expert balancing that have no effect with so many ranks."""
    if not spreads:
        logger.warning("--enable-eplb ignored: each instance holds all experts")
        return
    assert device.eplb is not None
    for remark in read_config(device.eplb_config)[1] if device.eplb_config is not None else ():
        logger.warning("--eplb-config: %s", remark)
    if device.eplb.num_redundant_experts > (most := num_experts * (ranks - 1)):
        logger.warning(
            "--eplb-config: num_redundant_experts %d means %d until instances join: each expert is on an "
            "instance once",
            device.eplb.num_redundant_experts, most,
        )  # fmt: skip


def _flags_of(balancing: Balancing | None) -> dict[str, Any]:
    """Flags that give the balancing on which a mesh agreed."""
    if balancing is None:
        return {"enable_eplb": False, "eplb_config": None, "eplb_survive": 0}
    config = {
        "window_size": balancing.window_size,
        "step_interval": balancing.window_size * balancing.windows,
        "num_redundant_experts": balancing.num_redundant,
        "log_balancedness": balancing.log_every > 0,
        "log_balancedness_interval": max(1, balancing.log_every),
    }
    text = msgspec.json.encode(config).decode()
    return {"enable_eplb": True, "eplb_config": text, "eplb_survive": balancing.survive}


def _spreads(config: EngineConfig, info: ModelInfo, size: int | None) -> bool:
    """Whether experts are spread: where it can be done, unless a flag forbids it.

    One instance has nothing to spread; with an unknown ``size``, nothing is spread yet.

    Raises:
        CheckpointError: a flag asks for it, and it cannot be done.
    """
    device = config.device
    asked = device.enable_expert_parallel
    if asked is False:
        return False
    if not info.num_experts or size is None or size < 2:
        if asked and (size is not None or not info.num_experts):
            why = f"{info.architecture} is a dense model" if not info.num_experts else (
                "one instance (-dp 1) holds all experts"
            )  # fmt: skip
            logger.warning("-ep ignored: %s", why)
        return False
    try:
        assign_experts(info.num_experts, size * device.tensor_parallel_size, device.expert_placement_strategy)
    except ValueError as error:
        if asked:
            raise CheckpointError(str(error)) from error
        owners = f"{size} instances" + (
            f" of {device.tensor_parallel_size} ranks each" if device.tensor_parallel_size > 1 else ""
        )
        problem = f"there are {info.num_experts} experts for {owners}"
    else:
        problem = why_experts_stay_whole(info) if asked else _why_whole(config, info)
        if asked and problem:
            raise CheckpointError(f"-ep: {problem}")
    if problem:
        logger.info("each instance holds all experts: %s", problem)
    return not problem


def _why_whole(config: EngineConfig, info: ModelInfo) -> str:
    """Reason for which experts are not spread by default; empty if they are."""
    device = config.device
    if config.model.load_format == "dummy":
        return "random weights are not spread"
    if config.workers_elsewhere:
        return "workers of an instance may be on several hosts (--nnodes, ray)"
    if device.tensor_parallel_size * device.pipeline_parallel_size > 1:
        return "instances are sharded themselves (-tp, -pp), and -ep does not ask for it"
    if has_gpu(device):
        return "on GPUs they are spread only with -ep, since tokens then travel in each layer"
    return why_experts_stay_whole(info)


def _check_sharding(device: DeviceConfig, info: ModelInfo) -> None:
    """Check ``-tp`` and ``-pp`` before any weight is read."""
    try:
        if device.tensor_parallel_size > 1 and info.num_heads:
            kv_heads_of(info.num_heads, info.num_kv_heads or info.num_heads, 0, device.tensor_parallel_size)
    except ValueError as error:
        size = device.tensor_parallel_size
        raise CheckpointError(f"--tensor-parallel-size {size}: {info.architecture}: {error}") from error
    try:
        if device.pipeline_parallel_size > 1 and info.num_layers:
            check_split(device.split, info.num_layers, device.pipeline_parallel_size)
    except ValueError as error:
        name = "--pipeline-parallel-size" if device.split is None else "--pipeline-split"
        raise CheckpointError(f"{name}: {error}") from error


def _context_length(asked: int | None, info: ModelInfo) -> int:
    if asked is None or asked == -1:
        return info.context_length  # an instance says how much of it fits its KV cache
    if asked < 1:
        raise CheckpointError(f"--max-model-len must be positive, or -1 for what fits, not {asked}")
    if asked > info.context_length:
        raise CheckpointError(
            f"--max-model-len {asked} is more than the model's context of {info.context_length} tokens"
        )
    return asked
