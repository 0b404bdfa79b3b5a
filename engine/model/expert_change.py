"""Exchange of the experts that a serving model holds, prepared in the background.

This is one rank's side of a change of the placement. What it holds already is taken from where it is; only
what it lacks is read. Where memory allows, the new tensors are complete before the change, so that the change
itself only exchanges pointers. Else they are put together layer by layer while it happens: the steps wait for
that long, but no layer stands in memory twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.model.checkpoint import CheckpointError, ReadingStopped
from engine.model.expert_weights import expert_modules, expert_parameters, read_experts
from engine.model.quantization.attached import CodesReader, reader_of
from engine.model.quantization.layers import keep_codes
from engine.quantization_config import OnlineName

logger = logging.getLogger(__name__)


class HeldExperts:
    """The experts of a model, in the order of their numbers.

    :meth:`prepare`, then :meth:`install`, exchange them.
    """

    def __init__(
        self,
        model: Any,
        directory: Path,
        experts: Sequence[int],
        limit_bytes: int | None = None,
        online: OnlineName | None = None,
    ) -> None:
        """``limit_bytes``: of all experts that are held, whatever memory is free.

        ``online``: how plain weights are quantised while they are read.
        """
        self._online = online
        self._limit_bytes = limit_bytes
        self._model = model
        self._directory = directory
        self._layers = expert_modules(model)
        self.experts = tuple(experts)
        self.bytes_per_expert: int = sum(
            parameter[0].nbytes if len(parameter) else 0
            for module in self._layers.values()
            for _, parameter in expert_parameters(module)
        )
        """Bytes of an expert over all layers."""
        self.copies = 1
        """Copies of each expert in memory; native kernels keep one of their own.

        Only copies that cost memory count.
        """
        self._next: _Change | None = None
        self._preparing = threading.Lock()
        self._swapping = threading.Lock()
        """Held while tensors are made from those that are held, or take their place."""

    def __repr__(self) -> str:
        return f"<HeldExperts {len(self.experts)} of each of {len(self._layers)} layers>"

    def rehearse(self) -> None:
        """Read one expert as a change does, to find out now whether that works.

        Also, the first change finds everything warm.

        Raises:
            CheckpointError: experts of this checkpoint cannot be read one by one.
        """
        read_experts(self._model, self._directory, self.experts[:1], online=self._online)

    def max_experts(self, free_bytes: int) -> int:
        """How many experts of each layer fit, with so much free memory beside them.

        0 means any number, as in a stage without expert layers.
        """
        if not self.bytes_per_expert:
            return 0
        each = self.bytes_per_expert * self.copies
        fit = len(self.experts) + max(0, free_bytes) // each
        return fit if self._limit_bytes is None else min(fit, max(1, self._limit_bytes // each))

    def check_limit(self) -> None:
        """Check that the experts held from the start are within the limit.

        Raises:
            CheckpointError: they take more.
        """
        count, each = len(self.experts), self.bytes_per_expert * self.copies
        if self._limit_bytes is not None and count * each > self._limit_bytes:
            raise CheckpointError(
                f"{count} experts of {each / 2**20:.1f} MiB each are more than --expert-memory-bytes "
                f"{self._limit_bytes}: raise it, or start more instances (-dp)"
            )

    def prepare(
        self, experts: Sequence[int], free_bytes: int, should_stop: Callable[[], bool] = lambda: False
    ) -> int:
        """Prepare to hold exactly these experts; returns how many had to be read.

        Meant for another thread than the one that computes; what was prepared before is dropped.

        Args:
            free_bytes: memory that may be used beside what is held.
            should_stop: returns True when these experts are not wanted any more.

        Raises:
            CheckpointError: they do not fit, or cannot be read any more.
            ReadingStopped: ``should_stop`` returned True.
        """
        with self._preparing:  # one that is not wanted any more stops soon
            if should_stop():
                raise ReadingStopped
            self._next = None
            self._next, num_missing = self._prepare(tuple(sorted(experts)), free_bytes, should_stop)
            return num_missing

    def _prepare(
        self, wanted: tuple[int, ...], free_bytes: int, should_stop: Callable[[], bool]
    ) -> tuple[_Change, int]:
        held = (
            self.experts
        )  # others may be installed while this reads: what it makes from these does not fit then
        missing = [expert for expert in wanted if expert not in held]
        if len(missing) * self.bytes_per_expert * self.copies > free_bytes:
            raise CheckpointError(
                f"{len(missing)} more experts of {self.bytes_per_expert / 2**20:.0f} MiB each do not fit "
                f"into the {free_bytes / 2**20:.0f} MiB that are free"
            )
        began = time.monotonic()
        rows = {}
        if missing:
            rows = read_experts(self._model, self._directory, missing, should_stop, self._online)
        change = _Change(held, wanted, missing, rows)
        if len(wanted) * self.bytes_per_expert <= free_bytes and wanted != held:
            with self._swapping:
                if self.experts == held:
                    change.build(self._layers)
        logger.debug("experts %s read in %.3f s", missing, time.monotonic() - began)
        return change, len(missing)

    def is_prepared(self, experts: Sequence[int]) -> bool:
        """Whether these can be installed: they are held, or were prepared from what is held."""
        wanted = tuple(sorted(experts))
        change = self._next
        return wanted == self.experts or (
            change is not None and (change.before, change.after) == (self.experts, wanted)
        )

    def install(self, experts: Sequence[int], free_bytes: Callable[[], int]) -> None:
        """Hold these experts from now on; between two steps.

        Experts that were not prepared, or were prepared from others than are held now, are read first.

        Raises:
            CheckpointError: they do not fit into ``free_bytes``, or cannot be read any more.
        """
        while not self._install_prepared(tuple(sorted(experts))):
            self.prepare(experts, free_bytes())

    def _install_prepared(self, wanted: tuple[int, ...]) -> bool:
        with self._swapping:
            change = self._next
            if not self.is_prepared(wanted):
                return False
            if wanted != self.experts:
                assert change is not None
                change.install(self._layers)
                self.experts = wanted
            self._next = None
            return True


class _Change:
    """The change from one set of experts to another."""

    def __init__(
        self,
        before: tuple[int, ...],
        after: tuple[int, ...],
        missing: list[int],
        rows: dict[str, torch.Tensor],
    ) -> None:
        """``rows``: of the missing ones, parameter -> [missing, ...]."""
        self.before, self.after = before, after
        self._kept = [(row, before.index(expert)) for row, expert in enumerate(after) if expert in before]
        self._new = [(row, missing.index(expert)) for row, expert in enumerate(after) if expert in missing]
        self._rows = rows
        found = {name: reader_of(tensor) for name, tensor in rows.items()}
        self._readers = {name: reader for name, reader in found.items() if reader is not None}
        """How to read the codes of the missing ones."""
        self._built: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"<_Change {self.before} -> {self.after}>"

    def build(self, layers: dict[str, Any]) -> None:
        """Lay out all new tensors beside the old ones."""
        for path, module in layers.items():
            for name, parameter in expert_parameters(module):
                self._built[f"{path}.{name}"] = self._tensor(f"{path}.{name}", parameter)

    def install(self, layers: dict[str, Any]) -> None:
        for path, module in layers.items():
            for name, parameter in expert_parameters(module):
                full = f"{path}.{name}"
                codes = self._codes(full, parameter)
                tensor = self._built[full] if full in self._built else self._tensor(full, parameter)
                fresh = torch.nn.Parameter(tensor, requires_grad=False)
                if codes is not None:
                    keep_codes(fresh, name, codes)
                setattr(module, name, fresh)
            module.num_experts = len(self.after)

    def _codes(self, full: str, parameter: torch.nn.Parameter) -> CodesReader | None:
        """How to read the codes of these experts; None where one has none."""
        held, read = reader_of(parameter), self._readers.get(full)
        if (held is None and self._kept) or (read is None and self._new):
            return None
        experts = {row: (held, old) for row, old in self._kept} | {row: (read, new) for row, new in self._new}
        ordered = [experts[row] for row in sorted(experts)]
        return CodesReader.of_experts([(reader, at) for reader, at in ordered if reader is not None])

    def _tensor(self, full: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The rows [after, ...] of one parameter, as it is typed and placed."""
        tensor = parameter.data.new_empty(len(self.after), *parameter.shape[1:])
        for row, old in self._kept:
            tensor[row].copy_(parameter.data[old])
        if self._new:
            rows = self._rows.pop(full)
            for row, new in self._new:
                tensor[row].copy_(rows[new])
        return tensor
