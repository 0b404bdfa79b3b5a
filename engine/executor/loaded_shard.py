"""A model, or one shard of it, with its weights on one device.

Knows nothing of the KV cache, steps and groups. Base of :mod:`engine.executor.spread_shard`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.attention import Backend
from engine.compute.fixed_blocks import FixedBlocks
from engine.config import EngineConfig
from engine.executor_contract import Progress
from engine.gpu.coded_parameter import coded_of
from engine.gpu.few_rows import leave_layers
from engine.host.cores import has_gpu
from engine.kernels.core import library
from engine.kernels.make import KeptForms, kept_by_torch, kept_of
from engine.model.checkpoint import CheckpointError, ModelInfo, chosen_dtype
from engine.model.choice import choose_backend
from engine.model.expert_change import HeldExperts
from engine.model.expert_weights import ExpertShare
from engine.model.experts_function import fix_experts
from engine.model.gguf.directory import SUFFIX
from engine.model.host_digest import HostDigest, host_digest
from engine.model.sharding.shard import Shard
from engine.model.weight_digest import StoredTensor, stored_tensors
from engine.model.weight_set import weight_files
from engine.model.weights import LoadedModel, load_model
from engine.numerics import check_kind, native_kind
from engine.speculation.draft_model import DraftModel
from engine.speculation.draft_source import find_draft
from engine.step import KVSpec, ModelFacts
from engine.vision.encoded_images import EncodedImages
from engine.vision.tower import computing_type, load_tower
from engine.weight_versions.shard_weights import ShardWeights
from parallel.expert_parallel import Dispatch
from parallel.placement import assign_experts

logger = logging.getLogger(__name__)


class LoadedShard:
    """One worker's shard of the model, and the facts about it."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        threads: int,
        place: tuple[int, int] | None,
        shard: Shard,
        before_first_run: Callable[[], None],
    ) -> None:
        """Arguments as of :class:`engine.executor.uni.UniExecutor`."""
        self._config = config
        self._place = place
        self._shard = shard
        self._before_first_run = before_first_run
        self._info = info
        self._threads = threads
        self._model: LoadedModel | None = None
        self._held: HeldExperts | None = None
        self._digest: HostDigest | None = None
        """Digest of the weights; None where they are random."""
        self._on_disk: dict[str, StoredTensor] = {}
        """Tensors of the checkpoint by name.

        None where they are random, or not in safetensors files.
        """
        self._new_weights: ShardWeights | None = None
        self._drafts: DraftModel | None = None
        """Model that proposes tokens, where this worker answers; None: none does."""
        self.image_encoder: EncodedImages | None = None
        """See :class:`.Executor`."""
        self._kept = KeptForms((), None)
        """What the model keeps of requests."""
        self._on_torch = config.device.on_torch
        library.choose(native_kind(config.device))
        self._backend: Backend = "TORCH_SDPA"

    def load(self, progress: Progress) -> ModelFacts:
        """See :class:`.Executor`."""
        device = self._device()
        check_kind(self._config.device)
        if device.type == "cuda":
            self._check_gpu()
        if device.type == "cpu" and not self._on_torch:
            library.begin_build()
        if self._threads > 0:
            torch.set_num_threads(self._threads)
        dtype: torch.dtype = getattr(torch, self._model_dtype)
        if self._config.model.reads_weights:
            self._digest = host_digest(Path(self._info.directory))
            files = [path for path in weight_files(Path(self._info.directory)) if path.suffix != SUFFIX]
            self._on_disk = {tensor.name: tensor for path in files for tensor in stored_tensors(path)}
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
        self._backend = self._choose_backend(model)
        if share is not None:
            self._held = HeldExperts(
                model.module,
                Path(self._info.directory),
                share.experts,
                self._config.device.expert_memory_bytes,
                self._config.model.online,
                self._info.num_experts,
            )
            self._held.check_limit(self._most_held)
            self._held.rehearse()
            if self._config.device.enable_eplb and device.type != "cpu":
                self._let_experts_move(model, self._held)
        block_size, has_states = self._config.cache.block_size, self._info.has_states
        on_torch = self._on_torch
        self._kept = kept_by_torch(model) if on_torch else kept_of(model, block_size, has_states=has_states)
        self._drafts = self._load_drafts(progress)
        self.image_encoder = self._load_tower(progress)
        progress(f"loaded {model.weight_bytes / 2**20:.0f} MiB in {time.monotonic() - began:.1f} s")
        return ModelFacts(
            architecture=self._info.architecture,
            num_parameters=model.num_parameters,
            weight_bytes=model.weight_bytes,
            vocab_size=model.vocab_size,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            kv=KVSpec(num_layers=len(model.layers), bytes_per_token=self._kv_bytes),
            has_all_layers=self._shard.is_first and self._shard.is_last,
            boundaries=[] if self._kept.states is None else [self._kept.states],
        )

    def _choose_backend(self, model: LoadedModel) -> Backend:
        wanted, whole = self._config.device.attention_backend, self._info.images_are_whole
        return choose_backend(wanted, model, self._config.cache, whole_images=whole)

    def _load_drafts(self, progress: Progress) -> DraftModel | None:
        """The model that proposes tokens, on the worker that answers; None: none does."""
        draft = find_draft(self._config, self._info) if self.answers else None
        if draft is None:
            return None
        progress(f"loading {draft.architecture} from {draft.directory}, which proposes tokens")
        return DraftModel(self._config, draft, self._info)

    def _load_tower(self, progress: Progress) -> EncodedImages | None:
        """Encoder of images, on each worker that begins the stream; None: the model takes none."""
        model, placeholder = self._model, self._info.image_token
        if placeholder is None or not self._shard.is_first:
            return None
        assert model is not None
        progress("loading the encoder of images")
        tower = load_tower(
            Path(self._info.directory), model.dtype, self._image_type, model.device, self._shard.neighbours
        )
        if not self._shard.is_last and tower.num_added > len(model.stage.layers):
            raise CheckpointError(
                f"-pp: the first stage has {len(model.stage.layers)} layers, and images add to the first "
                f"{tower.num_added}: give it more (--pipeline-split)"
            )
        return EncodedImages(tower, placeholder)

    @property
    def _image_type(self) -> torch.dtype:
        """Type of numbers that images are encoded in, the same at workers without the encoder."""
        model = self._model
        assert model is not None
        on_torch = model.device.type != "cpu" or self._config.device.on_torch
        return computing_type(model.dtype, model.device, None if on_torch else library.load())

    def _check_gpu(self) -> None:
        """Raise CheckpointError for what is asked for and is not built for GPUs."""
        if self._config.device.batch_invariant and (self._place is not None or not self._shard.is_whole):
            raise CheckpointError(
                "--batch-invariant on a GPU is built for one worker that has all experts: leave -ep, -tp and "
                "-pp out, or compute on the CPU (--device cpu)"
            )
        if self._info.has_states:
            raise CheckpointError(
                f"{self._info.architecture} has layers with a recurrent state, which are not built for GPUs: "
                "compute on the CPU (--device cpu)"
            )

    def _let_experts_move(self, model: LoadedModel, held: HeldExperts) -> None:
        """Keep experts in slots, so that graphs stay right, and sum results at home."""
        assert model.experts is not None
        model.experts.adds_by_choice = True
        held.use_slots(self._most_held)
        logger.info("experts move between slots of this device: %r", held.slots)

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
        return sum(layer.bytes_per_token(dtype, codes) for layer in self._kept.layers)

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
        """This instance's share of the experts; None where they are not spread."""
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
        """Device on which this worker computes.

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

    def _fix_tiles(self, model: LoadedModel) -> FixedBlocks:
        """Context in which Triton kernels compute, with tiles independent of the number of rows."""
        if any(map(coded_of, model.module.parameters())):
            raise CheckpointError(
                "--batch-invariant: tiles of packed weights follow the number of rows on a GPU. Leave the "
                "flag out, use a checkpoint that is not quantised, or compute on the CPU (--device cpu)"
            )
        if self._info.images_are_whole:
            raise CheckpointError(
                f"--batch-invariant on a GPU: in {self._info.architecture} rows of an image see all of it, "
                "which its kernels do not compute: leave the flag out, or compute on the CPU (--device cpu)"
            )
        from engine.compute.device_blocks import DeviceBlocks  # loads triton

        self._backend = "TRITON_FIXED"
        fix_experts(model.module)
        leave_layers(model.module)
        return DeviceBlocks(model.device)

    @property
    def _longest(self) -> int:
        """Tokens of the longest context that is served."""
        wanted = self._config.model.max_model_len or 0
        longest = wanted if wanted > 0 else self._info.context_length
        return min(longest, self._info.context_length)

    @property
    def _most_held(self) -> int:
        """Experts of each layer that this worker is to hold, copies for balance included."""
        eplb, place = self._config.device.eplb, self._place
        if eplb is None or place is None:
            return 0
        share = -(-(self._info.num_experts + eplb.num_redundant_experts) // place[1])
        return min(share, self._info.num_experts)

    def weights_digest(self, progress: Progress = lambda text: None) -> str:
        """The digest of the weights in use, which a thread makes; empty for random ones.

        Raises:
            CheckpointError: the weights changed while they were read.
        """
        if self._new_weights is not None and self._new_weights.digest:
            return self._new_weights.digest
        return "" if self._digest is None else self._digest.result(progress)

    @property
    def _model_dtype(self) -> str:
        return chosen_dtype(self._config.model.dtype, self._info, on_cpu=not has_gpu(self._config.device))


def _unsupported_device() -> str:
    """Kind of an accelerator that only torch could use here; empty without one."""
    kinds = {"MPS": torch.backends.mps.is_available, "XPU": torch.xpu.is_available}
    return next((kind for kind, is_here in kinds.items() if is_here()), "")
