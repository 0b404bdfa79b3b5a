"""The executor without workers: the model runs in the process of the scheduler."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from coordinator.messages import GroupPlan
from coordinator.numerics import TORCH, Arithmetic
from engine.attention import Backend, make_attention
from engine.attention.base import (
    PLAN_KEYWORD,
    AttentionUse,
    CapturableAttention,
    LayerShape,
    PackedRows,
    PagedAttention,
)
from engine.attention.torch_paged import gather_bytes
from engine.compute import invariance
from engine.compute.decode_graphs import CudaCapture, DecodeGraphs, make_graphs
from engine.compute.fixed_blocks import FixedBlocks
from engine.compute.graph_sizes import capture_sizes
from engine.compute.runner import ModelRunner, Pending, sampler_of
from engine.config import EngineConfig
from engine.executor_contract import ExpertTimes, Progress
from engine.host import memory
from engine.host.cache_size import experts_after_loss, leave_room, left_beside, share_of_device
from engine.host.cores import has_gpu
from engine.inheritance.shared_cache import SharedCache
from engine.inheritance.table import Table
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.lowering.buffers import Room
from engine.kernels.make import bytes_for_program, cached_layers, make_program
from engine.kernels.program import Program
from engine.model.checkpoint import CheckpointError, ModelInfo, chosen_dtype
from engine.model.choice import choose_backend
from engine.model.expert_change import Expert, HeldExperts
from engine.model.expert_exchange import exchange
from engine.model.expert_weights import ExpertShare
from engine.model.host_digest import HostDigest, host_digest
from engine.model.shard import WHOLE, Shard
from engine.model.weights import LoadedModel, load_model, sum_experts_in_order
from engine.numerics import check_kind, native_kind
from engine.step import KVSpec, ModelFacts, Span, Step, StepResult, most_tokens
from engine.transfers.block_memory import BlockMemory
from parallel.communicators.base import Communicator
from parallel.devices import device_sharers
from parallel.expert_moves import from_peers
from parallel.expert_parallel import Dispatch
from parallel.links.counts import LinkCount
from parallel.placement import Placement, assign_experts, held_by_rank
from parallel.replicas import replicas_at

logger = logging.getLogger(__name__)

CPU_KV_LIMIT, CPU_THROUGHPUT_KV_LIMIT = 4 << 30, 8 << 30
"""Most bytes of the KV cache on a CPU, where no flag sets its size.

The second is for --performance-mode throughput.
"""
CPU_KV_SHARE = 0.4
"""Share of free memory that the cache gets on CPU, up to the limit."""
SOURCE = "LOCKSTEP_EXPERTS_FROM"
"""Environment variable: with ``peers`` experts come from other hosts, however fast the disk is."""
KERNEL_COPIES = 2
"""Copies of each spread expert in memory: native kernels lay out their own."""


class UniExecutor:
    """An :class:`engine.executor_contract.Executor` of one model, or one shard of it, on one device."""

    in_flight = 1
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
        self._config = config
        self._place = place
        self._shard = shard
        self._before_first_run = before_first_run
        self._pending: deque[Pending] = deque()
        self.computes_apart = False
        self._info = info
        self._threads = threads
        self._model: LoadedModel | None = None
        self._held: HeldExperts | None = None
        self._prepared: GroupPlan | None = None
        """Plan whose experts were prepared last."""
        self._joined: GroupPlan | None = None
        """Plan of the group that it steps in."""
        self._digest: HostDigest | None = None
        """Digest of the weights; None where they are random."""
        self._untouched = memory.Untouched()
        self._runner: ModelRunner | None = None
        self._stored: list[torch.Tensor] = []
        """The tensors of the KV cache."""
        self._num_blocks = 0
        self.shared: SharedCache | None = None
        """Memory for the KV cache that outlives this process, where it is wanted.

        Set before :meth:`allocate`.
        """
        self._attention = self._attention_before = AttentionUse()
        """Time in attention, now and before the last step."""
        self._program: Program | None = None
        self._cached: tuple[LayerShape, ...] = ()
        """What the layers cache of a token."""
        self._on_torch = config.device.on_torch
        library.choose(native_kind(config.device))
        self._backend: Backend = "TORCH_SDPA"
        self._fixed: FixedBlocks | None = None
        """How torch's operators compute with ``--batch-invariant``; else None."""

    def __repr__(self) -> str:
        return f"UniExecutor({self._info.architecture}, threads={self._threads}, runner={self._runner!r})"

    def load(self, progress: Progress) -> ModelFacts:
        """See :class:`.Executor`."""
        device = self._device()
        check_kind(self._config.device)
        if device.type == "cuda" and self._config.device.batch_invariant:
            raise CheckpointError(
                "--batch-invariant is not built for GPUs: leave it out, or compute on the CPU (--device cpu)"
            )
        if device.type == "cuda" and self._config.device.enable_eplb:
            raise CheckpointError(
                "--enable-eplb is not built for GPUs: leave it out, or compute on the CPU (--device cpu)"
            )
        if device.type == "cpu" and not self._on_torch:
            library.begin_build()
        if self._threads > 0:
            torch.set_num_threads(self._threads)
        dtype: torch.dtype = getattr(torch, self._model_dtype)
        if self._config.model.reads_weights:
            self._digest = host_digest(Path(self._info.directory))
        progress(f"loading {self._info.architecture} from {self._info.directory} to {device}")
        began = time.monotonic()
        share, dispatch = self._share()
        model = load_model(
            self._info,
            self._config.model,
            dtype=dtype,
            device=device,
            share=share,
            dispatch=dispatch,
            shard=self._shard,
            before_first_run=self._when_read,
        )
        self._model = model
        wanted_backend = self._config.device.attention_backend
        self._backend = choose_backend(wanted_backend, model, self._config.cache)
        if share is not None:
            limit = self._config.device.expert_memory_bytes
            self._held = HeldExperts(
                model.module,
                Path(self._info.directory),
                share.experts,
                limit,
                self._config.model.online,
                self._info.num_experts,
            )
            self._held.check_limit(self._most_held)
            self._held.rehearse()
        self._cached = model.layers
        if not self._on_torch:
            self._cached = cached_layers(model, self._config.cache.block_size)
        progress(f"loaded {model.weight_bytes / 2**20:.0f} MiB in {time.monotonic() - began:.1f} s")
        return ModelFacts(
            architecture=self._info.architecture,
            num_parameters=model.num_parameters,
            weight_bytes=model.weight_bytes,
            vocab_size=model.vocab_size,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            kv=KVSpec(num_layers=len(model.layers), bytes_per_token=self._kv_bytes),
        )

    def _when_read(self) -> None:
        """Compile the kernels of a shard now: later its groups' deadlines would include it."""
        if (
            not self._shard.is_whole
            and self._model is not None
            and self._model.device.type == "cpu"
            and not self._on_torch
        ):
            library.load()
        self._before_first_run()

    @property
    def _kv_bytes(self) -> int:
        """Bytes of a token in the KV cache, with numbers or with codes."""
        assert self._model is not None, "load() comes first"
        dtype, codes = self._model.dtype, self._config.cache.kv_codes
        return sum(layer.bytes_per_token(dtype, codes) for layer in self._cached)

    @property
    def layers(self) -> range:
        """Numbers of the layers that are computed here."""
        assert self._model is not None, "load() comes first"
        return self._model.stage.layers

    @property
    def answers(self) -> bool:
        """Whether this worker's results are the instance's."""
        return self._shard.is_last and self._shard.rank == 0

    def _share(self) -> tuple[ExpertShare | None, Dispatch]:
        """Which experts are this instance's, and how it reaches the others."""
        settings = self._config.device
        if self._place is None:
            return None, "allgather_reducescatter"
        rank, size = self._place
        placement = assign_experts(self._info.num_experts, size, settings.expert_placement_strategy)
        dispatch: Dispatch = (
            "all_to_all" if settings.all2all_backend == "all_to_all" else "allgather_reducescatter"
        )
        return ExpertShare(placement, rank), dispatch

    def _device(self) -> torch.device:
        """Where this worker computes.

        A CUDA device becomes the current one of the calling thread, the one that steps: Triton launches
        kernels there, wherever their tensors are.
        """
        wanted = self._config.device.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise CheckpointError("--device cuda: torch finds no CUDA device here; use --device cpu")
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
            if wanted == "cpu" and (other := _unsupported_device()):
                logger.warning(
                    "computing on the CPU: %s devices are not supported, only CUDA and ROCm", other
                )
        if wanted == "cpu":
            return torch.device("cpu")
        found, place = torch.cuda.device_count(), self._shard.device
        if place >= found:
            raise CheckpointError(
                f"-tp {self._shard.size} -pp {self._shard.num_stages} puts at least {place + 1} workers "
                f"on this host, each of which needs a CUDA device; torch finds {found} here"
            )
        device = torch.device("cuda", place)
        torch.cuda.set_device(device)
        return device

    def free_kv_memory(self) -> int:
        """See :class:`.Executor`. On CUDA, after a run of the largest step."""
        assert self._model is not None, "load() comes first"
        if self._model.device.type == "cpu":
            free = memory.available_memory() - self._bytes_for_program() - self._bytes_for_copies()
            more = self._config.scheduler.goes_for_throughput
            limit = CPU_THROUGHPUT_KV_LIMIT if more else CPU_KV_LIMIT
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
        """What TORCH_SDPA will keep for gathered contexts, of which the largest step has none."""
        model = self._model
        assert model is not None
        return 0 if self._backend != "TORCH_SDPA" else gather_bytes(model.layers, model.dtype, self._longest)

    @property
    def _longest(self) -> int:
        """Tokens of the longest context that is served."""
        wanted = self._config.model.max_model_len or 0
        longest = wanted if wanted > 0 else self._info.context_length
        return min(longest, self._info.context_length)

    def _leave_room(self, share: int, left: int) -> int:
        """Bytes of the KV cache, with room beside it for a lost instance's experts."""
        if self._held is None or self._place is None:
            return share
        wanted = experts_after_loss(self._info.num_experts, self._place[1], self._shard.size)
        if not wanted:
            return share
        more = max(0, wanted - self._held.most) * self.expert_bytes
        room = int(more / (1 - memory.MARGIN))
        smaller = leave_room(share, left, room)
        if left + share - smaller < room:
            logger.warning(
                "experts: the %.1f GiB of those of a lost instance do not fit beside the KV cache: after a "
                "loss the mesh waits for another instance; lower --gpu-memory-utilization, or use more "
                "instances",
                more / 2**30,
            )
        elif more:
            logger.info("experts: %.1f GiB are left for those of one lost instance", more / 2**30)
        return smaller

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
        """What the native kernels will take, unless they have it already, or are not used.

        In lockstep one member at most takes a step beyond the usual budget.
        """
        if self._program is not None or self._on_torch:
            return 0
        assert self._model is not None
        scheduler, members = self._config.scheduler, 1 if self._place is None else self._place[1]
        largest = scheduler.largest_step()
        total = largest + (members - 1) * most_tokens(scheduler.token_budget())
        room = Room(largest, scheduler.most_sampled(), total)
        num_bytes = bytes_for_program(self._model, self._config.cache.block_size, room)
        return num_bytes * self._shard.neighbours

    @property
    def _most_held(self) -> int:
        """Experts of each layer that this worker is to hold, copies for balance included."""
        eplb, place = self._config.device.eplb, self._place
        if eplb is None or place is None:
            return 0
        share = -(-(self._info.num_experts + eplb.num_redundant_experts) // place[1])
        return min(share, self._info.num_experts)

    def _bytes_for_copies(self, others: int = 0) -> int:
        """What copies of experts will take that are not here yet.

        ``others``: bytes of what is still to come beside them.

        Raises:
            CheckpointError: that is more than is free.
        """
        held = self._held
        if held is None or not held.bytes_per_expert:
            return 0
        more = max(0, self._most_held - held.most)
        needed = more * held.bytes_per_expert * KERNEL_COPIES * self._shard.neighbours
        free = max(0, memory.available_memory() - others)
        if needed > free:
            raise CheckpointError(
                f"--eplb-config: {more} more experts of each layer on a worker take {needed / 2**20:.0f} "
                f"MiB, of which {free / 2**20:.0f} MiB are free: lower num_redundant_experts or "
                "--kv-cache-memory-bytes"
            )
        return needed

    def allocate(self, num_blocks: int) -> None:
        """See :class:`.Executor`."""
        model, block_size = self._model, self._config.cache.block_size
        assert model is not None, "load() comes first"
        self._num_blocks = num_blocks
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        self._bytes_for_copies(num_blocks * block_size * self._kv_bytes * self._shard.neighbours)
        self._untouched = memory.Untouched(num_blocks, block_size * self._kv_bytes)
        if self._program is None and not self._on_torch:
            self._program = make_program(model, block_size)
            self._on_torch = self._program is None
        self._check_kernels()
        if self._program is None and self._cached != model.layers:
            raise CheckpointError(
                f"the native kernels cannot compute {self._info.architecture} after all, as the log says. "
                "Torch needs a larger KV cache: set LOCKSTEP_NATIVE_KERNELS=0"
            )
        if self._program is None and self._config.device.batch_invariant:
            self._fix_blocks(model)
        if self._program is None:
            self.shared = None
        if self.shared is not None:
            self.shared.reserve(num_blocks)
        if self._program is not None:
            native = NativeCache(
                self._program.cached,
                num_blocks=num_blocks,
                block_size=block_size,
                dtype=model.dtype,
                codes=self._config.cache.kv_codes,
                memory=self.shared,
            )
            self._program.use(native)
            self._stored = native.stored
            self._runner = ModelRunner(model, None, block_size, self._program)
            self._attention = self._program.attention
            if self._held is not None:
                self._held.copies = KERNEL_COPIES
                self._held.on_built = self._program.prepare_experts
                self._held.check_limit(self._most_held)
            return
        cache = self._make_cache(num_blocks)
        self._stored = cache.stored if model.device.type == "cpu" else []
        graphs = self._make_graphs(cache, num_blocks)
        self.computes_apart = launches_ahead(self._place, self._shard, has_graphs=graphs is not None)
        fixed = self._fixed is not None
        self._runner = ModelRunner(model, cache, block_size, graphs=graphs, row_by_row=fixed)
        self._attention = cache.use

    def _fix_blocks(self, model: LoadedModel) -> None:
        """Compute in blocks of fixed size from now on.

        Raises:
            CheckpointError: bits of this model depend on the batch all the same.
        """
        if self._fixed is not None:
            return
        began = time.monotonic()
        self._backend = "TORCH_FIXED"
        self._fixed = FixedBlocks()
        sum_experts_in_order(model.module)
        invariance.check(model, self._fixed, self._make_cache, self._config.cache.block_size)
        logger.info("batch-invariant: checked in %.1f s", time.monotonic() - began)

    def block_memory(self) -> BlockMemory | None:
        """See :class:`.Executor`; None where the cache is on a device."""
        if not self._stored:
            return None
        shape = self._num_blocks, -1
        return BlockMemory([each.view(torch.uint8).reshape(shape).numpy() for each in self._stored])

    def published(self, identity: str) -> tuple[str, Table] | None:
        """Where the KV cache is found after this process died, and its table of blocks.

        None where it dies with it.
        """
        if self.shared is None or not self._stored:
            return None
        return self.shared.address, self.shared.table(identity, self._stored)

    def arithmetic(self) -> list[Arithmetic]:
        """See :class:`.Executor`."""
        model, program = self._model, self._program
        assert model is not None, "load() comes first"
        layers, weights = (self.layers.start, self.layers.stop), self.weights_digest()
        if program is not None:
            order = program.is_order_fixed
            return [Arithmetic(program.kind, program.version, "native", layers, order, weights=weights)]
        device, fixed = _torch_on(model.device), self._fixed is not None
        return [Arithmetic(TORCH, device, self._backend, layers, batch_invariant=fixed, weights=weights)]

    def weights_digest(self, progress: Progress = lambda text: None) -> str:
        """The digest of the checkpoint's weights, which a thread makes; empty for random ones.

        Raises:
            CheckpointError: the weights changed while they were read.
        """
        return "" if self._digest is None else self._digest.result(progress)

    def _check_kernels(self) -> None:
        """Refuse to compute with other kernels than were asked for.

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

    @property
    def _model_dtype(self) -> str:
        return chosen_dtype(self._config.model.dtype, self._info, on_cpu=not has_gpu(self._config.device))

    def _make_cache(self, num_blocks: int) -> PagedAttention:
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
        )

    def _make_graphs(self, cache: PagedAttention, num_blocks: int) -> DecodeGraphs | None:
        model, settings = self._model, self._config.device
        assert model is not None, "load() comes first"
        if model.device.type != "cuda" or settings.enforce_eager:
            return None
        if self._backend != "TRITON_ATTN":
            logger.info("CUDA graphs: off, TORCH_SDPA gathers contexts, whose sizes change")
            return None
        block_size = self._config.cache.block_size
        return make_graphs(
            model,
            cast(CapturableAttention, cache),
            capture_sizes(
                settings.cudagraph_capture_sizes,
                self._config.scheduler.most_requests(),
                each_small=self._config.scheduler.performance_mode == "interactivity",
            ),
            num_blocks=num_blocks,
            block_size=block_size,
            max_tokens=min(self._longest, num_blocks * block_size),
            capture=CudaCapture(model.device),
        )

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """See :class:`.Executor`. On a CPU the step is done when this returns."""
        assert self._runner is not None, "allocate() comes first"
        assert self._model is not None
        self._untouched.note(step)
        if self._model.experts is not None:
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
            self._pending.append(pending)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Groups of devices watch the step.

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
        """There are no workers that could end."""

    def _pass_expert_layers(self, model: LoadedModel) -> None:
        """Serve the other instances' tokens in every expert layer, without any of our own."""
        assert model.experts is not None
        hidden = torch.empty(0, model.hidden_size, dtype=model.dtype, device=model.device)
        ids = torch.empty(0, model.experts_per_token, dtype=torch.int64, device=model.device)
        weights = torch.empty(0, model.experts_per_token, dtype=model.dtype, device=model.device)
        with torch.inference_mode():
            for layer in model.expert_layers:
                model.experts.forward(layer, hidden, ids, weights)

    def join(self, group: Communicator, placement: Placement) -> None:
        """See :class:`.SpreadExecutor`."""
        assert self._model is not None
        assert self._model.experts is not None
        assert self._held is not None
        prepared = self._prepared
        self._joined = prepared if prepared is not None and prepared.placement == placement else None
        mine = held_by_rank(placement, 1, group.rank)
        self._held.install(mine[0], self.spare_memory)
        self._model.experts.join(group, placement)
        if self._program is not None:
            self._program.join(group, placement)

    def prepare(self, form: GroupPlan, place: int, free_bytes: int, should_stop: Callable[[], bool]) -> int:
        """See :class:`.SpreadExecutor`."""
        assert self._held is not None, "experts are not spread"
        experts = held_by_rank(form.placement, form.ranks, place)[self._shard.rank]
        replicas_at(form.placement, place * form.ranks + self._shard.rank)  # what the change asks for
        elsewhere = self._at_peers(form, place, experts)
        self._prepared = form
        return self._held.prepare(experts, free_bytes, should_stop, elsewhere)

    def _at_peers(self, form: GroupPlan, place: int, experts: Sequence[Sequence[int]]) -> set[Expert]:
        """Experts that come from instances of other hosts, which hold them now and stay."""
        held, now = self._held, self._joined
        assert held is not None
        if now is None or not goes_between_hosts(form) or not held.can_be_given:
            return set()
        hosts = {peer.instance: peer.host for peer in form.peers}
        copies = [now.placement.copies(layer) for layer in range(len(held.experts))]
        holders = {
            (layer, expert): {
                host
                for rank in copies[layer][expert]
                if (host := hosts.get(now.peers[rank // now.ranks].instance)) is not None
            }
            for layer, expert in held.missing(experts)
        }
        rates = held.disk_rate, held.link_rate
        return from_peers(holders, form.peers[place].host, *rates, always=os.environ.get(SOURCE) == "peers")

    def connect(self, form: GroupPlan, group: Communicator, should_stop: Callable[[], bool]) -> Communicator:
        """See :class:`.SpreadExecutor`. One group carries headers and tokens."""
        try:
            self.exchange(form, group, should_stop)
        except BaseException:
            group.abort()
            group.close()
            raise
        return group

    def exchange(self, form: GroupPlan, group: Communicator, should_stop: Callable[[], bool]) -> None:
        """Give experts to members on other hosts, and get those that :meth:`prepare` left out.

        All members of the group, which was just formed, call this.
        """
        held = self._held
        assert held is not None, "experts are not spread"
        assert self._model is not None
        if goes_between_hosts(form) and self._model.device.type == "cpu":
            hosts = [peer.host for peer in form.peers for _ in range(form.ranks)]
            exchange(group, held, hosts, should_stop)

    def link_counts(self) -> list[LinkCount]:
        """See :class:`.SpreadExecutor`. One group carries headers and tokens."""
        return []

    def experts_held(self) -> list[list[list[int]]]:
        """See :class:`.SpreadExecutor`; of a shard, of its own rank alone."""
        return [[list(of_layer) for of_layer in self._held.experts]] if self._held is not None else []

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in all layers computed here, in all copies held."""
        return self._held.bytes_per_expert * self._held.copies if self._held is not None else 0

    def max_experts(self, free_bytes: int) -> int:
        """See :class:`.SpreadExecutor`."""
        assert self._held is not None, "experts are not spread"
        return self._held.max_experts(free_bytes)

    def spare_memory(self) -> int:
        """See :class:`.SpreadExecutor`."""
        assert self._model is not None
        if self._model.device.type == "cpu":
            return memory.spare_memory(self._untouched)
        free, _ = torch.cuda.mem_get_info(self._model.device)
        device = self._model.device
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + unused) * (1 - memory.MARGIN))

    def expert_times(self) -> ExpertTimes | None:
        """See :class:`.Executor`."""
        if self._model is None or self._model.experts is None:
            return None
        times, use, before = self._model.experts.times, self._attention, self._attention_before
        return ExpertTimes(
            times.dispatch,
            times.experts,
            times.combine,
            use.seconds - before.seconds,
            use.calls - before.calls,
        )

    def tokens_per_expert(self) -> dict[int, int]:
        """See :class:`.Executor`."""
        if self._model is None or self._model.experts is None:
            return {}
        experts = self._model.experts
        experts.take_counts()
        counts = experts.tokens_per_expert
        held = {e for layer in range(len(counts)) for e in experts.placement.experts_of(experts.rank, layer)}
        total = counts.sum(axis=0).tolist()
        return {expert: total[expert] for expert in sorted(held)}

    def expert_loads(self) -> list[list[int]]:
        """See :class:`.SpreadExecutor`."""
        experts = self._model.experts if self._model is not None else None
        if experts is None:
            return []
        experts.take_counts()
        loads: list[list[int]] = experts.tokens_per_expert.tolist()
        return loads

    def set_threads(self, threads: int, cores: Sequence[int] = ()) -> None:
        """See :class:`.Executor`."""
        self._threads = threads
        torch.set_num_threads(threads)

    def spans(self) -> dict[str, list[Span]]:
        """See :class:`.Executor`."""
        return {"Engine": list(self._runner.spans) if self._runner is not None else []}

    def close(self) -> None:
        """Let go of the weights and the cache."""
        self._runner = None
        self._stored = []
        self._held = None
        self._model = None
        self._program = None


def launches_ahead(place: tuple[int, int] | None, shard: Shard, *, has_graphs: bool) -> bool:
    """Whether beginning a step only launches it, and its results are waited for later.

    Not in groups: they watch a step from its launch to its results, since a peer that is lost shows only as
    a device that waits. Without graphs a device is done hardly later than its last launch.
    """
    return has_graphs and place is None and shard.is_whole


def goes_between_hosts(form: GroupPlan) -> bool:
    """Whether members of a group are on several hosts."""
    return len({peer.host for peer in form.peers}) > 1


def _unsupported_device() -> str:
    """Kind of an accelerator that only torch could use here; empty without one."""
    kinds = {"MPS": torch.backends.mps.is_available, "XPU": torch.xpu.is_available}
    return next((kind for kind, is_here in kinds.items() if is_here()), "")


def _torch_on(device: torch.device) -> str:
    """What decides the bits of torch's operators on a device, besides torch's version."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    kernels = library.loaded()  # they sample, also where they do not compute the model
    sampler = "" if kernels is None else f", {kernels.version}"
    return f"{torch.backends.cpu.get_cpu_capability()}{sampler}"
