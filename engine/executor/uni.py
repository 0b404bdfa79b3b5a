"""The executor without workers: the model runs in the process of the scheduler."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from coordinator.messages import MemoryPart
from coordinator.numerics import TORCH, Arithmetic
from engine.adapters.held import HeldAdapters, adapter_room, held_adapters
from engine.adapters.torch_sites import make_sites
from engine.attention import make_attention
from engine.attention.base import (
    PLAN_KEYWORD,
    AttentionUse,
    CapturableAttention,
    PackedRows,
    PagedAttention,
)
from engine.attention.torch_paged import gather_bytes
from engine.compute import invariance
from engine.compute.decode_graphs import CudaCapture
from engine.compute.fixed_blocks import FixedBlocks
from engine.compute.graph_sizes import capture_sizes, prompt_sizes
from engine.compute.runner import ModelRunner, Pending, sampler_of
from engine.compute.step_graphs import StepGraphs, make_graphs
from engine.config import EngineConfig
from engine.config.scheduler import most_tokens
from engine.executor.cache_staging import CacheStaging
from engine.executor.spread_shard import KERNEL_COPIES, SpreadShard
from engine.gpu.copy_stream import CudaCopyStream
from engine.host import memory
from engine.host.cache_size import left_beside, share_of_device
from engine.host.page_release import give_back_pages
from engine.inheritance.shared_cache import SharedCache
from engine.inheritance.table import Table
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.lowering.buffers import BufferRoom
from engine.kernels.make import bytes_for_program, kept_by_torch, make_program
from engine.kernels.program import Program
from engine.model.checkpoint import CheckpointError, ModelInfo
from engine.model.experts_function import sum_experts_in_order
from engine.model.sharding.shard import WHOLE, Shard
from engine.model.weights import LoadedModel, align, bytes_to_align
from engine.numerics import native_kind
from engine.states.pool import own_zeros
from engine.step import Span, Step, StepResult
from engine.transfers.block_memory import BlockMemory, CacheMemory
from engine.transfers.piece_memory import PieceMemory
from engine.vision.other_tower import TowerReader
from engine.vision.tower import computed_on
from engine.weight_versions.shard_weights import ShardWeights
from parallel.communicators.base import CollectiveError
from parallel.devices import device_sharers

logger = logging.getLogger(__name__)

CPU_KV_LIMIT, CPU_THROUGHPUT_KV_LIMIT = 4 << 30, 8 << 30
"""Most bytes of the KV cache on a CPU, where no flag sets its size.

The second is for --performance-mode throughput.
"""
CPU_KV_SHARE = 0.4
"""Share of free memory that the cache gets on CPU, up to the limit."""
MAPPED = ", mapped weights"
"""Part of a numerics class: torch's operators read a mapped file, whose places decide bits."""


class UniExecutor(SpreadShard):
    """An :class:`engine.executor_contract.Executor` of one model, or one shard of it, on one device."""

    needs_tokens = False
    has_workers = False

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        threads: int,
        place: tuple[int, int] | None = None,
        shard: Shard = WHOLE,
        before_first_run: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepares the executor; :meth:`load` reads the weights.

        ``place``: (rank, size) in the group over which the experts are spread, None if they are not.
        ``shard``: the part of the model that is computed here, when this runs in one of several workers;
        ``before_first_run`` waits until all have read their weights.
        """
        super().__init__(config, info, threads, place, shard, before_first_run)
        self._pending: deque[Pending] = deque()
        self.in_flight = 1
        self.computes_apart = self.runs_ahead = False
        self._runner: ModelRunner | None = None
        self._stored: list[torch.Tensor] = []
        """The tensors of the KV cache."""
        self._num_begun = 0
        """Steps begun so far."""
        self.adapters: HeldAdapters | None = None
        """Low-rank adapters in memory; None: there is no room for any."""
        self._staging: CacheStaging | None = None
        """Copies of KV blocks from and to a device; None: there are none."""
        self._num_blocks = self._num_states = 0
        self.shared: SharedCache | None = None
        """Memory for the KV cache that outlives this process, where it is wanted.

        Set before :meth:`allocate`.
        """
        self._untouched = memory.Untouched()
        self._attention = self._attention_before = AttentionUse()
        self._mapped = ""
        self._fixed: FixedBlocks | None = None
        """Context in which torch computes with ``--batch-invariant``; else None."""

    def __repr__(self) -> str:
        return f"UniExecutor({self._info.architecture}, threads={self._threads}, runner={self._runner!r})"

    def free_kv_memory(self) -> int:
        """See :class:`.Executor`. On CUDA, after a run of the largest step."""
        assert self._model is not None, "load() comes first"
        if self._model.device.type == "cpu":
            free = memory.available_memory() - self._bytes_for_program() - self._bytes_for_copies()
            more = self._config.scheduler.goes_for_throughput
            limit = CPU_THROUGHPUT_KV_LIMIT if more else CPU_KV_LIMIT
            own, drafts = self._kv_bytes, self._drafts
            if drafts is not None:  # its blocks are beside those of the cache
                free -= drafts.bytes_to_come
                limit = limit * own // (own + drafts.kv_bytes)
                free = free * own // (own + drafts.kv_bytes)
            return min(limit, max(0, int(free * CPU_KV_SHARE)))
        self._run_largest_step()
        device, sharers = self._model.device, device_sharers()
        free, total = torch.cuda.mem_get_info(device)
        reserved, peak = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
        peak += self._gather_bytes()
        utilization = self._config.cache.utilization(sharers)
        share = share_of_device(total=total, free=free, reserved=reserved, peak=peak, utilization=utilization)
        left = left_beside(
            share,
            total=total,
            free=free,
            reserved=reserved,
            peak=peak,
            utilization=utilization,
            sharers=sharers,
        )
        return self._leave_room(share, left)

    def _gather_bytes(self) -> int:
        """Bytes for contexts that TORCH_SDPA gathers, which the largest step has none of."""
        model = self._model
        assert model is not None
        return 0 if self._backend != "TORCH_SDPA" else gather_bytes(model.layers, model.dtype, self._longest)

    def _run_largest_step(self) -> None:
        """Run the largest step, so that the allocator has seen it.

        It is one prompt as long as the token budget, with as many tokens to choose as a step may have.
        """
        model, block_size = self._model, self._config.cache.block_size
        assert model is not None
        length = min(most_tokens(self._config.scheduler.token_budget()), self._info.context_length)
        num_blocks = -(-length // block_size)
        cache = self._make_cache(num_blocks)
        positions = np.arange(length)
        packed = PackedRows(
            starts=np.zeros(1, dtype=np.int64),
            counts=np.array([length]),
            block_tables=np.arange(num_blocks, dtype=np.int32)[None],
            positions=positions,
            num_single=0,
        )
        ids = torch.from_numpy(positions % model.vocab_size).to(model.device).unsqueeze(0)
        num_sampled = self._config.scheduler.most_sampled()
        with torch.inference_mode():
            hidden = None
            if not self._shard.is_first:
                hidden = torch.zeros(1, length, model.hidden_size, dtype=model.dtype, device=model.device)
            output = model.stage.forward(
                model.module,
                hidden,
                input_ids=ids,
                position_ids=torch.from_numpy(positions).to(model.device).unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.arange(min(num_sampled, length), device=model.device),
                **{PLAN_KEYWORD: cache.plan(packed)},
            )
            if self._shard.is_last:
                if len(output) < num_sampled:  # the context is shorter than that
                    output = output.new_zeros(num_sampled, output.shape[1])
                sampler_of(model).rehearse(output)
        torch.cuda.synchronize(model.device)

    def _bytes_for_program(self) -> int:
        """Bytes that the native kernels or torch will take, 0 where they have them already.

        In lockstep one member at most takes a step beyond the usual budget.
        """
        if self._program is not None:
            return 0
        assert self._model is not None
        to_align = bytes_to_align(self._model.module, self._shard.neighbours)
        if self._on_torch:
            return to_align * self._shard.neighbours
        scheduler, members = self._config.scheduler, 1 if self._place is None else self._place[1]
        largest = scheduler.largest_step()
        total = largest + (members - 1) * most_tokens(scheduler.token_budget())
        room = BufferRoom(largest, scheduler.most_sampled(), total)
        requests = scheduler.most_requests()
        num_bytes = bytes_for_program(self._model, self._config.cache.block_size, room, requests)
        return (num_bytes or to_align) * self._shard.neighbours

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See :class:`.Executor`."""
        model, block_size = self._model, self._config.cache.block_size
        assert model is not None, "load() comes first"
        self._num_blocks, self._num_states = num_blocks, num_states
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        block_bytes = block_size * self._kv_bytes
        self._bytes_for_copies(num_blocks * block_bytes * self._shard.neighbours)
        self._untouched = memory.Untouched(num_blocks, block_bytes)
        if self._program is None and not self._on_torch:
            self._program = make_program(model, block_size, adapter_room(self._config.lora))
            self._on_torch = self._program is None
        self._check_kernels(model)
        if self._program is None:
            self._begin_on_torch(model)
        if self.shared is not None:
            self.shared.reserve(num_blocks, *[num_states] * bool(num_states))
        zeros = own_zeros if self.shared is None else self.shared.zeros
        if self._program is not None:
            self._program.allocate_states(num_states, num_blocks, zeros)
        elif model.states is not None:
            model.states.allocate(num_states, num_blocks, zeros)
        if self._program is not None:
            native = _native_cache(self._config, model, self._program, num_blocks, self.shared)
            self._program.use(native)
            self._stored = native.stored
            self.adapters = held_adapters(self._config.lora, model, self._program.sites)
            self._runner = ModelRunner(model, None, block_size, self._program, adapters=self.adapters)
            self._runner.see_images(self.image_encoder, self._info)
            self._runner.use_drafts(self._config.scheduler.speculative, self._drafts, num_blocks)
            self._attention = self._program.attention
            if self._held is not None:
                self._held.copies = KERNEL_COPIES
                self._held.on_built = self._program.prepare_experts
                self._held.check_limit(self._most_held)
            return
        cache = self._make_cache(num_blocks, self.shared)
        self._stored = cache.stored
        with self._fixed or contextlib.nullcontext():
            graphs = self._make_graphs(cache, num_blocks)
        if model.device.type == "cuda" and self._config.cache.moves_blocks and self._shard.is_whole:
            parts = [each.view(torch.uint8).view(len(each) // block_size, -1) for each in self._stored]
            self._staging = CacheStaging(
                CudaCopyStream(model.device),
                [each[:num_blocks] for each in parts],  # one is no request's
            )
        self.computes_apart = launches_ahead(self._place, self._shard, has_graphs=graphs is not None)
        is_wanted = self._config.scheduler.async_scheduling is not False
        self.runs_ahead = self.computes_apart and is_wanted and model.states is None
        self.in_flight = 1 + self.runs_ahead
        if room := adapter_room(self._config.lora):
            sites = make_sites(model, room, self._make_cache, block_size)
            self.adapters = held_adapters(self._config.lora, model, sites)
        by_row = self._fixed is not None
        self._runner = ModelRunner(
            model, cache, block_size, graphs=graphs, row_by_row=by_row, adapters=self.adapters
        )
        self._runner.see_images(self.image_encoder, self._info)
        self._attention = cache.use

    def _begin_on_torch(self, model: LoadedModel) -> None:
        """Let torch compute from now on, with ``--batch-invariant`` in blocks of fixed size.

        Raises:
            CheckpointError: bits of this model depend on the batch all the same.
        """
        if not align(model.module, self._shard.neighbours, self._untouched.num_bytes):
            self._mapped = MAPPED
        if self._fixed is not None or not self._config.device.batch_invariant:
            return
        began = time.monotonic()
        if self._backend == "TRITON_ATTN":
            self._fixed = self._fix_tiles(model)
        elif model.device.type == "cuda":
            raise CheckpointError(
                "--batch-invariant on a GPU needs --attention-backend TRITON_ATTN; the log says why it is "
                "not used. Leave the flag out, or compute on the CPU (--device cpu)"
            )
        else:
            self._backend = "TORCH_FIXED"
            self._fixed = FixedBlocks()
            sum_experts_in_order(model.module)
        if model.states is not None:
            model.states.around = self._fixed.in_one_shape
        invariance.check(model, self._fixed, self._make_cache, self._config.cache.block_size)
        logger.info("batch-invariant: checked in %.1f s", time.monotonic() - began)

    def block_memory(self) -> CacheMemory | None:
        """See :class:`.Executor`; None on a device, unless its blocks are to move."""
        if self._staging is not None:
            return self._staging.memory
        regions = self.regions
        return PieceMemory(regions) if len(regions) > 1 else next(iter(regions), None)

    @property
    def regions(self) -> list[BlockMemory]:
        """Host memory of KV blocks, and of recurrent states; none on devices."""
        if self._model is None or self._model.device.type != "cpu" or not self._num_blocks:
            return []
        counts = [self._num_blocks, self._num_states][: 1 + bool(self._num_states)]
        return [
            BlockMemory([each.view(torch.uint8).view(count, -1).numpy() for each in tensors], count)
            for count, tensors in zip(counts, self._tensors, strict=True)
        ]

    @property
    def _tensors(self) -> list[list[torch.Tensor]]:
        """Tensors of each region."""
        if not self._num_states:
            return [self._stored]
        assert self._model is not None
        states = self._model.states if self._program is None else self._program.states
        return [self._stored, [] if states is None or states.pool is None else states.pool.stored]

    def published(self, identity: str) -> tuple[str, Table] | None:
        """Place of the KV cache that outlives this process, and its table of blocks.

        None where it dies with it.
        """
        if self.shared is None or not self._num_blocks:
            return None
        return self.shared.address, self.shared.table(identity, *self._tensors)

    def arithmetic(self) -> list[Arithmetic]:
        """See :class:`.Executor`."""
        model, program = self._model, self._program
        assert model is not None, "load() comes first"
        layers, weights = (self.layers.start, self.layers.stop), self.weights_digest()
        images = ""
        if self._info.image_token is not None and model.device.type == "cpu":  # of all stages: one class
            images = f", {computed_on(self._image_type)}"
            if self.image_encoder is not None and self.image_encoder.tower.is_mapped:
                images += MAPPED
        if program is not None:
            order, version = program.is_order_fixed, program.version + images
            return [Arithmetic(program.kind, version, "native", layers, order, weights=weights)]
        device, fixed = _torch_on(model.device) + self._mapped + images, self._fixed is not None
        return [Arithmetic(TORCH, device, self._backend, layers, batch_invariant=fixed, weights=weights)]

    def _check_kernels(self, model: LoadedModel) -> None:
        """Refuse to compute with other kernels than asked for, or than the cache's.

        Raises:
            CheckpointError: these do not compute the model; the log says why.
        """
        wanted = native_kind(self._config.device)
        found = TORCH if self._program is None else self._program.kind
        if wanted not in (None, found):
            what = "torch's operators compute" if found == TORCH else f"{found} kernels compute"
            raise CheckpointError(
                f"--numerics {wanted}: {what} {self._info.architecture} in {self._model_dtype} here; use "
                f"--numerics {found}, or auto"
            )
        if self._program is None and self._kept != kept_by_torch(model):
            raise CheckpointError(
                f"the native kernels cannot compute {self._info.architecture} after all, as the log says. "
                "Torch needs another KV cache: set LOCKSTEP_NATIVE_KERNELS=0"
            )
        if self._program is None and self._drafts is not None:
            raise CheckpointError(
                "--speculative-config: draft models propose for models that the native kernels compute, and "
                f"{self._info.architecture} is computed by torch here, as the log says: draft by ngram"
            )
        if self._program is None and self._config.lora.enable_lora and self._shard.size > 1:
            raise CheckpointError(
                f"--enable-lora with -tp: parts of adapters are computed by the native kernels, which do not "
                f"compute {self._info.architecture} here, as the log says: leave one of the two out"
            )

    def _make_cache(self, num_blocks: int, memory: SharedCache | None = None) -> PagedAttention:
        model = self._model
        assert model is not None, "load() comes first"
        return make_attention(
            model.layers,
            num_blocks=num_blocks,
            block_size=self._config.cache.block_size,
            dtype=model.dtype,
            device=model.device,
            backend=self._backend,
            codes=self._config.cache.kv_codes,
            memory=None if memory is None else memory.zeros,
        )

    def _make_graphs(self, cache: PagedAttention, num_blocks: int) -> StepGraphs | None:
        model, settings = self._model, self._config.device
        assert model is not None, "load() comes first"
        if model.device.type != "cuda" or settings.enforce_eager:
            return None
        if self._backend not in ("TRITON_ATTN", "TRITON_FIXED"):
            logger.info("CUDA graphs: off, TORCH_SDPA gathers contexts, whose sizes change")
            return None
        block_size, scheduler = self._config.cache.block_size, self._config.scheduler
        requests = scheduler.most_requests()
        return make_graphs(
            model,
            cast(CapturableAttention, cache),
            capture_sizes(
                settings.cudagraph_capture_sizes,
                requests,
                each_small=scheduler.performance_mode == "interactivity",
            ),
            num_blocks=num_blocks,
            block_size=block_size,
            max_tokens=min(self._longest, num_blocks * block_size),
            most_chosen=requests,
            capture=CudaCapture(model.device),
            prompt_sizes=prompt_sizes(
                settings.cudagraph_prompt_sizes, requests, most_tokens(scheduler.token_budget())
            ),
        )

    @property
    def new_weights(self) -> ShardWeights:
        """Preparation and switch of other weights, once there is a cache."""
        assert self._model is not None, "load() comes first"
        if self._new_weights is None:
            self._new_weights = ShardWeights(
                self._info, self._config.model, self._model, self._program, self._on_disk, self.spare_memory,
                self._held,
            )  # fmt: skip
            self._new_weights.num_steps = lambda: self._num_begun
            self._new_weights.drafts = self._drafts
            if self.image_encoder is not None:
                self._new_weights.tower = TowerReader(self.image_encoder, Path(self._info.directory))
        return self._new_weights

    def give_back(self, part: MemoryPart) -> bool:
        """See :class:`.ChangingExecutor`."""
        if part is MemoryPart.WEIGHTS:
            return self.new_weights.give_back()
        self._untouched = memory.Untouched(self._num_blocks, self._config.cache.block_size * self._kv_bytes)
        return sum(give_back_pages(tensors) for tensors in self._tensors) > 0

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """See :class:`.Executor`. On a CPU the step is done when this returns."""
        assert self._runner is not None, "allocate() comes first"
        assert self._model is not None
        self._untouched.note(step)
        self._num_begun += 1
        if self._model.experts is not None:
            if self._new_weights is not None and self._new_weights.are_given_back:
                raise CollectiveError("its weights are given back: the mesh sleeps", None, "aborted")
            self._model.experts.begin(sizes)
            self._attention_before = replace(self._attention)
        with self._fixed or contextlib.nullcontext(), self._watched():
            only_serves = self._model.experts is not None and not step.slots
            if only_serves and (self._program is None or not self._program.serve()):
                self._pass_expert_layers(self._model)
            pending = self._runner.begin(step)
            if not self.computes_apart:
                result = pending()
                pending = lambda: result  # noqa: E731
            self._pending.append(pending if self._staging is None else self._staging.marked(pending))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Context of a step that the communicators of devices watch.

        A peer that is lost would only show as a device that waits.

        Raises:
            CollectiveError: one of them broke in the step.
        """
        model = self._model
        assert model is not None
        experts = None if model.experts is None else model.experts.group
        with contextlib.ExitStack() as watched:
            for group in (self._shard.ranks, self._shard.stages, experts):
                if (watch := getattr(getattr(group, "group", group), "watched", None)) is not None:
                    watched.enter_context(watch())
            yield

    def finish(self) -> StepResult:
        """See :class:`.Executor`."""
        return self._pending.popleft()()

    def check(self) -> None:
        """Check for lost workers: does nothing, since there are none."""

    def set_threads(self, threads: int, cores: Sequence[int] = ()) -> None:
        """See :class:`.Executor`."""
        self._threads = threads
        torch.set_num_threads(threads)

    def spans(self) -> dict[str, list[Span]]:
        """See :class:`.Executor`."""
        return {"Engine": list(self._runner.spans) if self._runner is not None else []}

    def close(self) -> None:
        """Let go of the weights and the cache."""
        self._runner = self.adapters = None
        self._stored = []
        self._staging = None
        self._held = None
        self._model = self._drafts = None
        self._new_weights = self._program = None


def launches_ahead(place: tuple[int, int] | None, shard: Shard, *, has_graphs: bool) -> bool:
    """Whether beginning a step only launches it, and its results are waited for later.

    Not in groups: they watch a step from its launch to its results, since a peer that is lost shows only as
    a device that waits. Without graphs a device is done hardly later than its last launch.
    """
    return has_graphs and place is None and shard.is_whole


def _torch_on(device: torch.device) -> str:
    """Facts besides torch's version that decide the bits of its operators on a device."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    kernels = library.loaded()  # they sample, also where they do not compute the model
    sampler = "" if kernels is None else f", {kernels.version}"
    return f"{torch.backends.cpu.get_cpu_capability()}{sampler}"


def _native_cache(
    config: EngineConfig, model: LoadedModel, program: Program, num_blocks: int, memory: SharedCache | None
) -> NativeCache:
    """Cache of a native program; ``memory``: that outlives this process, or None."""
    return NativeCache(
        program.cached,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        dtype=model.dtype,
        codes=config.cache.kv_codes,
        memory=memory,
    )
