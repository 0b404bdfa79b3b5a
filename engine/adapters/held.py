"""Adapters in a worker's memory, and those among them that its kernels compute with."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coordinator.messages import AdapterSource
from engine.adapters.adapter_files import Adapter, read_adapter
from engine.adapters.adapter_settings import AdapterError, check_place, settled
from engine.adapters.torch_sites import TorchSites
from engine.attention.base import Int64s, PackedRows
from engine.config.lora import LoraConfig
from engine.kernels.adapters.sites import TAG_DIGITS, AdapterRoom, LowRank, SiteKey, Sites, keys_of
from engine.model.sharding.shard import PassThrough
from engine.model.weights import LoadedModel

logger = logging.getLogger(__name__)


class HeldAdapters:
    """Adapters of one worker, by their digest."""

    def __init__(self, model: LoadedModel, sites: Sites | TorchSites, allowed: str | None = None) -> None:
        """``model``: it, or this worker's shard; ``sites``: of its layers, or its native program.

        ``allowed``: directory that adapters must be in whose digest is not known; None: any.
        """
        self._allowed = allowed
        self._model, self._sites = model, sites
        self._spread = sites if isinstance(sites, Sites) and sites.spread_keys else None
        elsewhere = {id(part) for part in model.module.modules() if isinstance(part, PassThrough)}
        self._names = {name: key for name, key in keys_of(model.module).items() if key[0] not in elsewhere}
        self._parts: dict[str, dict[SiteKey, LowRank]] = {}
        """Matrices by digest; those of spread experts are laid out instead."""
        self._in_use: dict[int, str] = {}
        """Digest by number."""

    def __repr__(self) -> str:
        return f"<HeldAdapters: {len(self._parts)}, {len(self._in_use)} in use>"

    def load(self, sources: Sequence[AdapterSource]) -> None:
        """Read adapters into memory.

        Raises:
            AdapterError: one cannot be served; the message says why.
        """
        for source in sources:
            self._read(settled(source))

    def read(self, source: AdapterSource) -> AdapterSource:
        """Read one adapter while steps run, in any thread; returns it with its digest.

        Raises:
            AdapterError: it cannot be served, or is not the one of that digest.
        """
        if not source.digest:
            check_place(Path(source.path), self._allowed)
        found = settled(source)
        if found.digest not in self._parts:
            self._read(found)
        return found

    def drop(self, digests: Collection[str]) -> None:
        """Forget adapters that no request has."""
        for digest in digests:
            if self._parts.pop(digest, None) is not None and self._spread is not None:
                self._spread.let_go(tag_of(digest))

    def _read(self, source: AdapterSource) -> None:
        adapter = read_adapter(source, self._whole(), self._sites.room.rank)
        parts = self._placed(source, adapter)
        settled(source)  # else what was read may have another digest
        if self._spread is not None:
            if tag_of(source.digest) in map(tag_of, self._parts):
                raise AdapterError(
                    f"adapter {source.name} has nearly the digest of another one: change a number"
                )
            keys = self._spread.spread_keys & parts.keys()
            self._spread.hold(tag_of(source.digest), {key: parts.pop(key) for key in keys})
        self._parts[source.digest] = parts
        num_bytes = sum(part.a.nbytes + part.b.nbytes for part in adapter.parts.values())
        logger.info(
            "adapter %s: rank %d, %d layers, %.1f MiB",
            source.name, adapter.rank, len(adapter.parts), num_bytes / 2**20,
        )  # fmt: skip

    def _whole(self) -> Any:
        """A model of the whole class, without memory."""
        sharded, module = self._model.sharded, self._model.module
        with torch.device("meta"):
            return (type(module) if sharded is None else type(sharded.whole))(module.config)

    def _placed(self, source: AdapterSource, adapter: Adapter) -> dict[SiteKey, LowRank]:
        """This worker's part of the matrices, by the key of their layer."""
        places, names = self._sites.keys, self._names
        here = {name: part for name, part in adapter.parts.items() if name in names}
        other = next((name for name in here if names[name] not in places), None)
        if other is not None:
            experts = "" if isinstance(self._sites, TorchSites) else "experts, "
            raise AdapterError(
                f"adapter {source.name} adapts {other}: of this model, adapters of embedding, attention's "
                f"projections, MLPs, {experts}and the output layer are served"
            )
        return {names[name]: self._cut(name, part) for name, part in here.items()}

    def _cut(self, name: str, part: LowRank) -> LowRank:
        """This rank's part of a layer's matrices, cut as its weights are."""
        cuts = {} if self._model.sharded is None else self._model.sharded.done.cuts
        cut = cuts.get(f"{name}.weight") or cuts.get(name)
        if cut is None:
            return part
        if part.of_tokens:
            tokens = part.a.mT
            return part._replace(a=cut.take(tokens, tuple(tokens.shape)).contiguous().mT)
        a, b = part.a, part.b
        dim = cut.dim % max(a.dim(), 2)
        if dim != a.dim() - 2:
            a = cut.take(a, tuple(a.shape)).contiguous()
        if dim != a.dim() - 1:
            b = cut.take(b, tuple(b.shape)).contiguous()
        return part._replace(a=a, b=b)

    def use(self, number: int, digest: str) -> None:
        """Compute rows of this number with this adapter; no step may run meanwhile."""
        if self._in_use.get(number) == digest:
            return
        self._in_use.pop(number, None)
        self._sites.put(number, self._parts[digest], 0 if self._spread is None else tag_of(digest))
        self._in_use[number] = digest

    def step(self, packed: PackedRows, wanted: Int64s) -> AbstractContextManager[None]:
        """Context in which torch computes a step; ``wanted``: indices of the tokens with logits."""
        if packed.adapters is None or not isinstance(self._sites, TorchSites):
            return contextlib.nullcontext()
        return self._sites.step(np.repeat(packed.adapters, packed.counts), wanted)


READ_AHEAD = 8
"""Adapters in memory beside those of the mesh: being loaded, or not dropped yet."""


def tag_of(digest: str) -> int:
    """Tag of an adapter among the choices of spread experts, never 0."""
    return int(digest[:TAG_DIGITS], 16) or 1


def adapter_room(config: LoraConfig) -> AdapterRoom | None:
    """Room for adapters that settings ask for; None for none."""
    if not config.enable_lora:
        return None
    return AdapterRoom(config.max_loras, config.max_lora_rank, config.max_cpu_loras + READ_AHEAD)


def held_adapters(
    config: LoraConfig, model: LoadedModel, sites: Sites | TorchSites | None
) -> HeldAdapters | None:
    """The adapters of the settings, read for a model; None without room for any.

    Raises:
        AdapterError: one cannot be served.
    """
    if sites is None:
        return None
    held = HeldAdapters(model, sites, config.allowed_local_adapter_path)
    held.load(config.sources)
    with contextlib.suppress(ImportError):  # beside steps it would take many seconds
        import_module("torch.distributed.tensor")
        import_module("peft.tuners.lora")
    return held
