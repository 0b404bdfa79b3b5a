"""Adapters in a worker's memory, and those among them that its kernels compute with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from coordinator.messages import AdapterSource
from engine.adapters.adapter_files import Adapter, read_adapter
from engine.adapters.adapter_settings import AdapterError, settled
from engine.config.lora import LoraConfig
from engine.kernels.adapters.sites import AdapterRoom, LowRank, Sites

logger = logging.getLogger(__name__)


class HeldAdapters:
    """Adapters of one worker, by their digest."""

    def __init__(self, module: Any, sites: Sites) -> None:
        """``module``: the model; ``sites``: places in its native program."""
        self._module, self._sites = module, sites
        self._names = {name: id(part) for name, part in module.named_modules()}
        self._parts: dict[str, dict[int, LowRank]] = {}
        self._in_use: dict[int, str] = {}
        """Digest by number."""

    def __repr__(self) -> str:
        return f"<HeldAdapters: {len(self._parts)}, {len(self._in_use)} in use>"

    def load(self, sources: Sequence[AdapterSource]) -> None:
        """Read adapters into memory.

        Raises:
            AdapterError: one cannot be served; the message says why.
        """
        for source in map(settled, sources):
            with torch.device("meta"):
                whole = type(self._module)(self._module.config)
            adapter = read_adapter(source, whole, self._sites.room.rank)
            self._parts[source.digest] = self._placed(source, adapter)
            num_bytes = sum(part.a.nbytes + part.b.nbytes for part in adapter.parts.values())
            logger.info(
                "adapter %s: rank %d, %d layers, %.1f MiB",
                source.name, adapter.rank, len(adapter.parts), num_bytes / 2**20,
            )  # fmt: skip

    def _placed(self, source: AdapterSource, adapter: Adapter) -> dict[int, LowRank]:
        """Matrices by the ``id`` of their layer."""
        places = self._sites.modules
        other = next((name for name in adapter.parts if self._names.get(name) not in places), None)
        if other is not None:
            raise AdapterError(
                f"adapter {source.name} adapts {other}: of this model, adapters of attention's projections "
                "and of MLPs are served"
            )
        return {self._names[name]: part for name, part in adapter.parts.items()}

    def use(self, number: int, digest: str) -> None:
        """Compute rows of this number with this adapter; no step may run meanwhile."""
        if self._in_use.get(number) == digest:
            return
        self._in_use.pop(number, None)
        self._sites.put(number, self._parts[digest])
        self._in_use[number] = digest


def adapter_room(config: LoraConfig) -> AdapterRoom | None:
    """Room for adapters that settings ask for; None for none."""
    return AdapterRoom(config.max_loras, config.max_lora_rank) if config.enable_lora else None


def held_adapters(config: LoraConfig, module: Any, sites: Sites | None) -> HeldAdapters | None:
    """The adapters of the settings, read for a model; None without room for any.

    Raises:
        AdapterError: one cannot be served.
    """
    if sites is None:
        return None
    held = HeldAdapters(module, sites)
    held.load(config.sources)
    return held
