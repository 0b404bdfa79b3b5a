"""The executor without workers: the model runs in the process of the scheduler."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import psutil
import torch

from engine.attention import make_attention
from engine.attention.base import PLAN_KEYWORD, PackedRows
from engine.checkpoint import DTYPE_NAMES, CheckpointError, ModelInfo
from engine.config import EngineConfig
from engine.executor.base import ExpertTimes, Progress
from engine.expert_weights import ExpertShare
from engine.runner import ModelRunner
from engine.step import KVSpec, ModelFacts, Step, StepResult
from engine.weights import LoadedModel, load_model
from parallel.communicators.base import Communicator
from parallel.expert_parallel import Dispatch
from parallel.placement import place

CPU_KV_LIMIT = 4 << 30
CPU_KV_SHARE = 0.4
"""On CPU the cache gets this share of the memory that is free, up to the limit."""


class UniExecutor:
    """Implements ``executor.base.Executor`` with one model on one device."""

    def __init__(
        self, config: EngineConfig, info: ModelInfo, threads: int, place: tuple[int, int] | None = None
    ) -> None:
        """``place``: (rank, size) in the group over which the experts are spread, None if they are not."""
        self._config = config
        self._place = place
        self._info = info
        self._threads = threads
        self._model: LoadedModel | None = None
        self._runner: ModelRunner | None = None

    def __repr__(self) -> str:
        return f"UniExecutor({self._info.architecture}, threads={self._threads}, runner={self._runner!r})"

    def load(self, progress: Progress) -> ModelFacts:
        """See ``executor.base.Executor``."""
        device = self._device()
        if self._threads > 0:
            torch.set_num_threads(self._threads)
        name = self._config.model.dtype
        dtype: torch.dtype = getattr(torch, self._info.dtype if name == "auto" else DTYPE_NAMES[name])
        progress(f"loading {self._info.architecture} from {self._info.directory} to {device}")
        began = time.monotonic()
        share, dispatch = self._share()
        model = load_model(
            self._info, self._config.model, dtype=dtype, device=device, share=share, dispatch=dispatch
        )
        self._model = model
        progress(f"loaded {model.weight_bytes / 2**20:.0f} MiB in {time.monotonic() - began:.1f} s")
        return ModelFacts(
            architecture=self._info.architecture,
            num_parameters=model.num_parameters,
            weight_bytes=model.weight_bytes,
            vocab_size=model.vocab_size,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            kv=KVSpec(num_layers=len(model.layers), bytes_per_token=model.kv_bytes_per_token),
        )

    def _share(self) -> tuple[ExpertShare | None, Dispatch]:
        """Which experts are this instance's, and how it reaches the others."""
        settings = self._config.device
        if self._place is None:
            return None, "allgather_reducescatter"
        rank, size = self._place
        placement = place(self._info.num_experts, size, settings.expert_placement_strategy)
        dispatch: Dispatch = (
            "all_to_all" if settings.all2all_backend == "all_to_all" else "allgather_reducescatter"
        )
        return ExpertShare(placement, rank), dispatch

    def _device(self) -> torch.device:
        wanted = self._config.device.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise CheckpointError("--device cuda: torch finds no CUDA device here; use --device cpu")
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(wanted)

    def free_kv_memory(self) -> int:
        """See ``executor.base.Executor``. On CUDA, after a run of the largest step."""
        assert self._model is not None, "load() comes first"
        if self._model.device.type == "cpu":
            return min(CPU_KV_LIMIT, int(psutil.virtual_memory().available * CPU_KV_SHARE))
        self._run_largest_step()
        free, total = torch.cuda.mem_get_info(self._model.device)
        held = torch.cuda.memory_reserved(self._model.device)
        peak = torch.cuda.max_memory_reserved(self._model.device)
        used_by_others = total - free - held
        budget = int(total * self._config.cache.gpu_memory_utilization)
        return max(0, budget - int(used_by_others + peak))

    def _run_largest_step(self) -> None:
        """One prompt as long as the token budget, so that the allocator has seen its largest step."""
        model, block_size = self._model, self._config.cache.block_size
        assert model is not None
        length = min(self._config.scheduler.max_num_batched_tokens, self._info.context_length)
        num_blocks = -(-length // block_size)
        cache = make_attention(
            model.layers, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device
        )
        positions = np.arange(length)
        packed = PackedRows(
            starts=np.zeros(1, dtype=np.int64),
            counts=np.array([length]),
            block_tables=np.arange(num_blocks, dtype=np.int32)[None],
            positions=positions,
            num_single=0,
        )
        ids = torch.from_numpy(positions % model.vocab_size).to(model.device).unsqueeze(0)
        num_logits = min(self._config.scheduler.max_num_seqs, length)
        with torch.inference_mode():
            logits = model.module(
                input_ids=ids,
                position_ids=torch.from_numpy(positions).to(model.device).unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.arange(num_logits, device=model.device),
                **{PLAN_KEYWORD: cache.plan(packed)},
            ).logits
            torch.softmax(logits.float(), dim=-1)
        torch.cuda.synchronize(model.device)

    def allocate(self, num_blocks: int) -> None:
        """See ``executor.base.Executor``."""
        model, block_size = self._model, self._config.cache.block_size
        assert model is not None, "load() comes first"
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        cache = make_attention(
            model.layers, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device
        )
        self._runner = ModelRunner(model, cache, block_size)

    def execute(self, step: Step, sizes: Sequence[int] = ()) -> StepResult:
        """See ``executor.base.Executor``."""
        assert self._runner is not None, "allocate() comes first"
        assert self._model is not None
        if self._model.experts is not None:
            self._model.experts.begin(sizes)
            if not step.rows:
                self._pass_expert_layers(self._model)
        return self._runner.run(step)

    def _pass_expert_layers(self, model: LoadedModel) -> None:
        """Serve the other instances' tokens in every expert layer, without any of our own."""
        assert model.experts is not None
        hidden = torch.empty(0, model.hidden_size, dtype=model.dtype, device=model.device)
        ids = torch.empty(0, model.experts_per_token, dtype=torch.int64, device=model.device)
        weights = torch.empty(0, model.experts_per_token, dtype=model.dtype, device=model.device)
        with torch.inference_mode():
            for layer in model.expert_layers:
                model.experts.forward(layer, hidden, ids, weights)

    def join(self, group: Communicator) -> None:
        """See ``executor.base.Executor``."""
        assert self._model is not None
        assert self._model.experts is not None
        self._model.experts.join(group)

    def expert_times(self) -> ExpertTimes | None:
        """See ``executor.base.Executor``."""
        if self._model is None or self._model.experts is None:
            return None
        times = self._model.experts.times
        return ExpertTimes(times.dispatch, times.experts, times.combine)

    def tokens_per_expert(self) -> dict[int, int]:
        """See ``executor.base.Executor``."""
        if self._model is None or self._model.experts is None:
            return {}
        experts = self._model.experts
        counts = experts.tokens_per_expert.tolist()
        return {expert: counts[expert] for expert in experts.placement.experts_of(experts.rank)}

    def set_threads(self, threads: int) -> None:
        """See ``executor.base.Executor``."""
        self._threads = threads
        torch.set_num_threads(threads)

    def close(self) -> None:
        """Let go of the weights and the cache."""
        self._runner = None
        self._model = None
