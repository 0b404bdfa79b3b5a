"""New weights of a worker's shard, prepared while steps run and swapped between two.

The module of a model that kernels compute runs no more, so it may hold the new tensors while they are laid
out. One that torch computes gets them at the switch. No number is copied there, only pointers change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch

from engine.config import ModelConfig
from engine.host.background import Pace, beside_steps
from engine.host.memory import MARGIN, READING_TURN_TIMEOUT, is_out_of_memory, return_freed_memory, turn
from engine.host.openmp import compute_with
from engine.host.shared_tensors import SharedBytes, sample_of
from engine.kernels.other_weights import NativeWeights, PreparedWeights, TorchWeights, kept_buffers
from engine.kernels.program import Program
from engine.model.checkpoint import ModelInfo, ReadingStopped
from engine.model.errors import first_line
from engine.model.expert_change import HeldExperts
from engine.model.quantization.attached import forget_codes, without_memory
from engine.model.tensors_again import read_again
from engine.model.weight_digest import StoredTensor
from engine.model.weight_files import OpenFile
from engine.model.weight_set import check_weights, weight_files
from engine.model.weights import LoadedModel, share_again
from engine.weight_versions.contract import WeightsRefused, WeightsSuperseded
from engine.weight_versions.private_files import PrivateFiles
from engine.weight_versions.resting import Resting
from engine.weight_versions.same_model import check_config, check_tensors
from engine.weight_versions.spread_weights import SpreadWeights

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


class PartBeside(Protocol):
    """Contract of what may be a part of the checkpoint beside the model's own layers."""

    @property
    def bytes_again(self) -> int:
        """Bytes that :meth:`prepare` takes."""
        ...

    def prepare(self, directory: Path, open_file: OpenFile) -> PreparedWeights | None: ...


class ShardWeights:
    """The weights of a shard that is loaded, and at most one other version."""

    def __init__(
        self,
        info: ModelInfo,
        settings: ModelConfig,
        model: LoadedModel,
        program: Program | None,
        stored: Mapping[str, StoredTensor],
        free_memory: Callable[[], int],
        held: HeldExperts | None = None,
    ) -> None:
        """``program``: native kernels that compute the model; None: torch does.

        ``stored``: tensors of the checkpoint that was loaded. ``free_memory``: bytes beside what the KV cache
        may still take. ``held``: experts of this instance, where they are spread over several.
        """
        self._held = held
        self._info, self._settings = info, settings
        self._model, self._program = model, program
        self._stored = stored
        self._free_memory = free_memory
        self.num_steps: Callable[[], int] = lambda: 0
        """Steps begun so far: beside them, little is done at once."""
        self.drafts: PartBeside | None = None
        """What proposes tokens by layers of the checkpoint; None: nothing does."""
        self._next: PreparedWeights | None = None
        self.tower: PartBeside | None = None
        """Encoder of images; None: there is none here."""
        self._next_tower: PreparedWeights | None = None
        self._next_drafts: PreparedWeights | None = None
        self._spread: SpreadWeights | None = None
        """Experts of the version that is prepared, where they are spread over instances."""
        self._next_digest = ""
        self.digest = ""
        """Digest of the version in use; empty: of the checkpoint that was loaded."""
        self._source = self._next_source = info.directory
        self._samples: list[tuple[int, bytes]] = []
        """Samples of what was given back, which others of this host may have."""
        self.are_given_back = False
        """Whether no step can be computed before :meth:`switch`."""

    def __repr__(self) -> str:
        return f"<ShardWeights {self.digest or 'as loaded'}, next {self._next_digest or 'none'}>"

    def prepare(self, directory: str, should_stop: Callable[[], bool] = lambda: False) -> str:
        """Read and lay out the weights of a directory; returns their digest.

        Called in a background thread while steps run; what was prepared before is given back. An empty name:
        those in use, read again.

        Raises:
            WeightsRefused: they cannot be used here; the message says why.
            WeightsSuperseded: ``should_stop`` returned True.
        """
        self.discard()
        try:
            self._check_model()
            began = time.monotonic()
            self._next_source = directory = directory or self._source
            digest = beside_steps(lambda: self._prepare(Path(directory), should_stop))
        except ReadingStopped as error:
            self.discard()
            raise WeightsSuperseded from error
        except WeightsRefused:
            self.discard()
            raise
        except Exception as error:
            self.discard()
            if is_out_of_memory(error):
                raise WeightsRefused("there is no memory for a second version of the weights") from error
            logger.debug("weights cannot be used", exc_info=True)
            raise WeightsRefused(f"{directory}: {first_line(error)}") from error
        logger.info("weights of %s prepared in %.2f s", directory, time.monotonic() - began)
        self._next_digest = digest
        return digest

    def switch(self) -> None:
        """Use what was prepared from the next step on; called between two steps."""
        assert self._next is not None, "prepare() comes first"
        self._next.switch()
        if self._spread is not None and self._held is not None:
            experts = self._held.experts
            self._spread.switch(self._next_digest)
            if self.are_given_back:  # no group is entered, which would bring its own
                self._held.install(experts, self._free_memory)
        for beside in (self._next_drafts, self._next_tower):
            if beside is not None:
                beside.switch()
        self._spread = self._next_drafts = self._next_tower = None
        self.digest, self._next, self._next_digest = self._next_digest, None, ""
        self._source = self._next_source
        self.are_given_back = False

    def give_back(self) -> bool:
        """Let go of the weights in use; False if they cannot be read again.

        Called between two steps; none comes before they are prepared again, and switched to.
        """
        try:
            self._check_model()
        except WeightsRefused as error:
            logger.warning("weights stay in memory: %s", error)
            return False
        if self._held is not None:  # what is prepared from those in use is void
            self._held.replace(Path(self._source), self._held.experts, {}, self._held.weights)
        if self._program is not None:
            self._program.laid_out.give_back()
            self._program.exchange.products.give_back()
            self._program.replace_weights(self._program.laid_out)  # lists of steps have their addresses
        tensors = dict(self._model.module.named_parameters()) | kept_buffers(self._model.module)
        if self._shares:
            self._samples = [sample_of(each) for each in tensors.values() if each.is_contiguous()]
        for tensor in tensors.values():
            tensor.data = without_memory(tensor)
            forget_codes(tensor)
        self.are_given_back = True
        return True

    def discard(self) -> None:
        """Give back what was prepared, if anything was."""
        if self._next is not None:
            self._next.discard()
        if self._next_drafts is not None:
            self._next_drafts.discard()
        self._next = self._spread = self._next_drafts = self._next_tower = None
        self._next_digest = ""

    def _check_model(self) -> None:
        if self._model.device.type != "cpu":
            raise WeightsRefused("new weights while an instance runs are not built for GPUs")
        if self._program is not None and self._program.sites is not None:
            raise WeightsRefused("new weights are not built for a mesh with adapters (--enable-lora)")
        if not self._settings.reads_weights or not self._stored:
            raise WeightsRefused("new weights need a checkpoint of safetensors files to begin with")

    def _prepare(self, directory: Path, should_stop: Callable[[], bool]) -> str:
        check_weights(directory)
        pace = Pace(self.num_steps)
        compute_with(1)
        with Resting(pace.rest):
            return self._read_and_lay_out(directory, should_stop, pace)

    def _read_and_lay_out(self, directory: Path, should_stop: Callable[[], bool], pace: Pace) -> str:
        files = PrivateFiles(weight_files(directory), should_stop, pace.rest)
        check_config(Path(self._info.directory), directory)
        check_tensors(self._stored, {name: tensor for name, (_, tensor) in files.homes.items()})
        with self._room(should_stop):
            if self._shares:
                files.shared = SharedBytes()
            self._check_memory(files.bytes_to_come, files.shared)
            self._next = self._read(directory, files, should_stop)
        if self.drafts is not None:
            self._next_drafts = self.drafts.prepare(directory, files.open)
        if self.tower is not None:
            self._next_tower = self.tower.prepare(directory, files.open)
        return files.digest()

    @property
    def _shares(self) -> bool:
        """Whether torch computes with tensors that instances of this host have once."""
        return self._program is None and self._held is None

    def _room(self, should_stop: Callable[[], bool]) -> AbstractContextManager[None]:
        """Context in which one process a time takes memory that it shares.

        The next one finds what the one before it has read.
        """

        def look() -> None:
            if should_stop():
                raise ReadingStopped

        return turn(READING_TURN_TIMEOUT, while_waiting=look) if self._shares else nullcontext()

    def _read(self, directory: Path, files: PrivateFiles, should_stop: Callable[[], bool]) -> PreparedWeights:
        model = self._model
        spread = (
            None
            if self._held is None
            else SpreadWeights(model.module, self._held, self._info.num_experts, directory)
        )
        module = read_again(
            self._info, self._settings, model.dtype, model.stage.shard, directory, files.open,
            None if spread is None else spread.share,
        )  # fmt: skip
        found = dict(module.named_parameters(remove_duplicate=False)) | kept_buffers(module)
        self._check_found(found)
        if spread is not None:
            found = spread.take(found, self._settings.online, should_stop)
        self._spread = spread
        if self._program is not None:
            return NativeWeights(model, self._program, found)
        if self._shares:
            share_again(found.values())
            return_freed_memory()
        return TorchWeights(model.module, found)

    def _check_memory(self, num_bytes: int, shared: SharedBytes | None) -> None:
        """Check that there is room for what this shard reads, and for its laid-out form."""
        shard = self._model.stage.shard
        here = num_bytes // (shard.size * shard.num_stages)
        if self._held is not None:  # of the experts, this member's
            here = min(num_bytes, self._model.weight_bytes)
        if shared is not None and self.are_given_back and self._next_source == self._source:
            here = shared.bytes_to_come(self._samples)
        laid_out = 0 if self._program is None else self._program.weight_bytes
        laid_out += sum(each.bytes_again for each in (self.drafts, self.tower) if each is not None)
        at_once = 1 if self._shares else shard.neighbours  # those that share look one by one
        needed, free = (here + laid_out) * at_once, self._free_memory()
        if needed > free * (1 - MARGIN):
            raise WeightsRefused(
                f"there is no memory for both versions: {needed / 2**20:.1f} MiB are needed beside the "
                f"weights in use, and {free / 2**20:.1f} MiB are free; lower --kv-cache-memory-bytes"
            )

    def _check_found(self, found: Tensors) -> None:
        module = self._model.module
        here = dict(module.named_parameters(remove_duplicate=False)) | kept_buffers(module)
        if found.keys() != here.keys():
            names = ", ".join(sorted(found.keys() ^ here.keys())[:3])
            raise WeightsRefused(f"the tensors make another model here: {names}")
        for name, tensor in found.items():
            if tensor.dtype != here[name].dtype:
                raise WeightsRefused(f"{name} is read as {tensor.dtype}, not as {here[name].dtype}")
