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
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.config.quantization import OnlineName
from engine.gpu.expert_slots import ExpertSlots, SlotChange, slots_for
from engine.host.background import let_go
from engine.model.checkpoint import CheckpointError, ReadingStopped
from engine.model.expert_weights import expert_modules, expert_parameters, read_experts
from engine.model.quantization.attached import CodesReader, reader_of
from engine.model.quantization.layers import attach_expert_codes

logger = logging.getLogger(__name__)


Held = tuple[tuple[int, ...], ...]
"""Experts by layer, each ascending."""
Expert = tuple[int, int]
"""An expert: its layer among those with experts, and its number there."""
OnBuilt = Callable[[Any, dict[str, torch.nn.Parameter], Sequence[int]], None]
"""Called with a module, its next tensors, and each expert's row now, or -1."""


def pairs_of(experts: Sequence[Sequence[int]]) -> set[Expert]:
    """Set of (layer, expert) of experts that are listed by layer."""
    return {(layer, expert) for layer, some in enumerate(experts) for expert in some}


def _by_layer(experts: Collection[Expert], num_layers: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(num_layers)]
    for layer, expert in sorted(experts):
        found[layer].append(expert)
    return found


class HeldExperts:
    """The experts of a model, by layer and in the order of their numbers.

    :meth:`prepare`, then :meth:`install`, exchange them.
    """

    def __init__(
        self,
        model: Any,
        directory: Path,
        experts: Sequence[int],
        limit_bytes: int | None = None,
        online: OnlineName | None = None,
        num_experts: int = 0,
    ) -> None:
        """``experts``: in each layer. ``limit_bytes``: of all that are held, whatever memory is free.

        ``online``: how plain weights are quantised while they are read. ``num_experts``: those of a layer, on
        all members together; 0: none come from other members.
        """
        self.num_experts = num_experts
        self._online = online
        self._limit_bytes = limit_bytes
        self._model = model
        self._directory = directory
        self._layers = expert_modules(model)
        self.experts: Held = (tuple(experts),) * len(self._layers)
        self._bytes: list[int] = [
            sum(parameter[0].nbytes if len(parameter) else 0 for _, parameter in expert_parameters(module))
            for module in self._layers.values()
        ]
        self.bytes_per_expert: int = sum(self._bytes)
        """Bytes of an expert over all layers."""
        self.on_built: OnBuilt | None = None
        """Called with each laid-out module while a change is prepared."""
        self.copies = 1
        """Copies of each expert in memory; native kernels keep one of their own.

        Only copies that cost memory count.
        """
        self.slots: ExpertSlots | None = None
        """Slots in tensors that stay, where experts are on a device and move; else None."""
        self.disk_rate = self.link_rate = 0.0
        """Bytes per second of the last experts read, and given by others; 0: none yet."""
        self.weights = ""
        """Digest of the weights that are held; empty: random, or not made yet."""
        self._next: _Change | None = None
        self._version = 0
        """Rises where other weights take the place of those that are held."""
        self._preparing = threading.Lock()
        self._swapping = threading.Lock()
        """Lock while tensors are made from the held ones, or take their place."""

    def __repr__(self) -> str:
        return f"<HeldExperts {self.most} of each of {len(self._layers)} layers>"

    @property
    def most(self) -> int:
        """Most experts held in a layer."""
        return max(map(len, self.experts), default=0)

    def use_slots(self, most: int) -> None:
        """Keep experts in tensors of fixed size from now on.

        ``most``: experts of a layer that are to be held. ``--expert-memory-bytes`` bounds the slots, too.
        """
        slots = slots_for(max(most, self.most), self.num_experts)
        if self._limit_bytes is not None and self.bytes_per_expert:
            slots = min(slots, max(self.most, self._limit_bytes // self.bytes_per_expert))
        self.slots = ExpertSlots(list(self._layers.values()), self.experts, slots, expert_parameters)

    def rehearse(self) -> None:
        """Read one expert as a change does, to find out now whether that works.

        Also, the first change finds everything warm.

        Raises:
            CheckpointError: experts of this checkpoint cannot be read one by one.
        """
        self._read([experts[:1] for experts in self.experts])

    def _read(
        self, experts: Sequence[Sequence[int]], should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, torch.Tensor]:
        """See :func:`read_experts`."""
        began = time.monotonic()
        rows = read_experts(self._model, self._directory, experts, should_stop, self._online)
        if rows:
            self.disk_rate = self._bytes_of(experts) / max(time.monotonic() - began, 1e-6)
        return rows

    def max_experts(self, free_bytes: int) -> int:
        """Most experts of a layer that fit, with so much free memory beside them.

        0 means any number, as in a stage without expert layers.
        """
        if not self.bytes_per_expert:
            return 0
        each = self.bytes_per_expert * self.copies
        fit = self.most + max(0, free_bytes) // each
        if self.slots is not None:  # a layer that gets more slots stands in memory twice for a moment
            slots = self.slots.capacity
            fit = max(slots, (max(0, free_bytes) + slots * each) // (each + max(self._bytes)))
        return fit if self._limit_bytes is None else min(fit, max(1, self._limit_bytes // each))

    def check_limit(self, most_held: int = 0) -> None:
        """Check that the experts held from the start are within the limit.

        ``most_held``: experts of each layer that are to be held later, with copies for balance.

        Raises:
            CheckpointError: they take more.
        """
        count, each = max(self.most, most_held), self.bytes_per_expert * self.copies
        fewer = ", or lower num_redundant_experts" if most_held > self.most else ""
        if self._limit_bytes is not None and count * each > self._limit_bytes:
            raise CheckpointError(
                f"{count} experts of {each / 2**20:.1f} MiB each are more than --expert-memory-bytes "
                f"{self._limit_bytes}: raise it, or start more instances (-dp){fewer}"
            )

    def prepare(
        self,
        experts: Sequence[Sequence[int]],
        free_bytes: int,
        should_stop: Callable[[], bool] = lambda: False,
        elsewhere: Collection[Expert] = (),
    ) -> int:
        """Prepare to hold exactly these experts; returns how many had to be read.

        That is in the layer of which most had to.

        Meant for another thread than the one that computes; what was prepared before is dropped.

        Args:
            experts: by layer, or one list for all layers.
            free_bytes: memory that may be used beside what is held.
            should_stop: returns True when these experts are not wanted any more.
            elsewhere: experts that others will give; :meth:`complete` ends the preparation.

        Raises:
            CheckpointError: they do not fit, or cannot be read any more.
            ReadingStopped: ``should_stop`` returned True.
        """
        with self._preparing:  # one that is not wanted any more stops soon
            if should_stop():
                raise ReadingStopped
            self._next = None
            wanted = self._of_layers(experts)
            self._next, num_missing = self._prepare(wanted, free_bytes, should_stop, elsewhere)
            return num_missing

    def _of_layers(self, experts: Sequence[Sequence[int]]) -> Held:
        repeated = experts if len(experts) == len(self._layers) else list(experts) * len(self._layers)
        return tuple(tuple(sorted(of_layer)) for of_layer in repeated)

    def _prepare(
        self,
        wanted: Held,
        free_bytes: int,
        should_stop: Callable[[], bool],
        elsewhere: Collection[Expert],
    ) -> tuple[_Change, int]:
        held = (
            self.experts
        )  # others may be installed while this reads: what it makes from these does not fit then
        missing = [
            [expert for expert in after if expert not in before]
            for after, before in zip(wanted, held, strict=True)
        ]
        num_missing = max(map(len, missing), default=0)
        missing_bytes = self._bytes_for(wanted, missing)
        if missing_bytes > free_bytes:
            raise CheckpointError(
                f"{num_missing} more experts of {missing_bytes / 2**20:.1f} MiB do not fit into the "
                f"{free_bytes / 2**20:.1f} MiB that are free"
            )
        began = time.monotonic()
        elsewhere = pairs_of(missing) & set(elsewhere)
        change = _Change(held, wanted, missing, elsewhere, self.slots, self._version)
        self._read_into(change, _by_layer(pairs_of(missing) - change.wanted, len(held)), should_stop)
        changed = [after if after != before else () for after, before in zip(wanted, held, strict=True)]
        fits = self._bytes_of(changed) * self.copies <= free_bytes
        change.fits_beside = fits or self.slots is not None
        self._build(change, should_stop)
        logger.debug("%d experts read in %.3f s", num_missing, time.monotonic() - began)
        return change, num_missing

    def _bytes_for(self, wanted: Held, missing: Sequence[Sequence[int]]) -> int:
        """Bytes that a change takes beside what is held; free slots cost nothing.

        Layers whose slots do not suffice get other tensors, one after the other.
        """
        if self.slots is None:
            return self._bytes_of(missing) * self.copies
        larger = [of_layer if len(of_layer) > self.slots.capacity else () for of_layer in wanted]
        more = [range(len(of_layer) - self.slots.capacity) if of_layer else () for of_layer in larger]
        most = max((len(some) * each for some, each in zip(larger, self._bytes, strict=True)), default=0)
        return self._bytes_of(more) + most

    def _read_into(
        self, change: _Change, experts: Sequence[Sequence[int]], should_stop: Callable[[], bool]
    ) -> None:
        if any(experts):
            change.take(list(self._layers), experts, self._read(experts, should_stop))

    def _build(self, change: _Change, should_stop: Callable[[], bool]) -> None:
        """Lay a complete change out before it is installed, if there is room."""
        if not change.fits_beside or change.wanted or change.before == change.after:
            return
        with self._swapping:
            if (self.experts, self._version) == (change.before, change.version):
                change.build(self._layers, self.on_built, should_stop)

    # ---- experts that others give

    @property
    def can_be_given(self) -> bool:
        """Whether other members may give experts; packed ones are read from the checkpoint."""
        known = [each for module in self._layers.values() for _, each in expert_parameters(module)]
        are_plain = all(each.is_cpu and reader_of(each) is None for each in known)
        return are_plain and self._online is None and self.num_experts > 0

    def missing(self, experts: Sequence[Sequence[int]]) -> set[Expert]:
        """Experts that are wanted, by layer or in all, and not held."""
        return pairs_of(self._of_layers(experts)) - pairs_of(self.experts)

    @property
    def wanted(self) -> set[Expert]:
        """Experts that others are to give, for what is prepared."""
        return set() if self._next is None else set(self._next.wanted)

    def bytes_of(self, layer: int) -> int:
        """Bytes of an expert of a layer, in one copy."""
        return self._bytes[layer]

    def data_of(self, which: Expert) -> tuple[torch.Tensor, str]:
        """Bytes of a held expert and the digest of its weights.

        The bytes are those of its parameters in a row.
        """
        layer, expert = which
        module = list(self._layers.values())[layer]
        with self._swapping:
            held = self.experts[layer].index(expert)
            at = held if self.slots is None else self.slots.row_of(layer, expert)
            parts = [parameter.data[at] for _, parameter in expert_parameters(module)]
            weights = self.weights
        return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts]), weights

    def complete(self, given: Mapping[Expert, torch.Tensor], should_stop: Callable[[], bool]) -> None:
        """Finish a preparation: experts that were not given are read.

        ``given``: bytes of experts, as :meth:`data_of` has them. Raises as :meth:`prepare` does.
        """
        with self._preparing:
            change = self._next
            if change is None or not change.wanted:
                return
            if should_stop():
                raise ReadingStopped
            for (layer, expert), data in given.items():
                path, module = list(self._layers.items())[layer]
                change.take_bytes(path, module, expert, data)
            self._read_into(change, _by_layer(change.wanted - given.keys(), len(self._layers)), should_stop)
            change.wanted.clear()
            self._build(change, should_stop)

    def _bytes_of(self, experts: Sequence[Sequence[int]]) -> int:
        """Bytes of experts by layer, in one copy."""
        return sum(len(of_layer) * each for of_layer, each in zip(experts, self._bytes, strict=True))

    def is_prepared(self, experts: Sequence[Sequence[int]]) -> bool:
        """Whether these experts are held, or prepared to be installed."""
        wanted = self._of_layers(experts)
        change = self._next
        return wanted == self.experts or (
            change is not None
            and not change.wanted
            and change.version == self._version
            and (change.before, change.after) == (self.experts, wanted)
        )

    def install(self, experts: Sequence[Sequence[int]], free_bytes: Callable[[], int]) -> None:
        """Swap in the prepared experts, between two steps.

        Experts that were not prepared, or were prepared from others than are held now, are read first.

        Raises:
            CheckpointError: they do not fit into ``free_bytes``, or cannot be read any more.
        """
        while not self._install_prepared(self._of_layers(experts)):
            self.prepare(experts, free_bytes())

    # ---- other weights

    def replace(
        self,
        directory: Path,
        experts: Held,
        parameters: Mapping[str, Mapping[str, torch.nn.Parameter]],
        weights: str,
    ) -> None:
        """Hold experts of another version of the weights, between two steps.

        ``weights``: its digest. Further ones are read from its directory from now on. What was prepared of
        the version before is void.
        """
        replaced = []
        with self._swapping:
            for (path, module), of_layer in zip(self._layers.items(), experts, strict=True):
                for name, parameter in parameters.get(path, {}).items():
                    replaced.append(getattr(module, name))
                    setattr(module, name, parameter)
                module.num_experts = len(of_layer)
            self.experts, self._directory, self._next = experts, directory, None
            self.weights = weights
            self._version += 1
        let_go(replaced)

    def _install_prepared(self, wanted: Held) -> bool:
        with self._swapping:
            change = self._next
            if not self.is_prepared(wanted):
                return False
            if wanted != self.experts:
                assert change is not None
                let_go(change.install(self._layers))
                self.experts = wanted
            self._next = None
            return True


class _Change:
    """The change from one set of experts to another, of the layers that differ."""

    def __init__(
        self,
        before: Held,
        after: Held,
        missing: Sequence[Sequence[int]],
        wanted: set[Expert],
        slots: ExpertSlots | None,
        version: int,
    ) -> None:
        """``wanted``: experts that others will give. ``slots``: where experts are on a device.

        ``version``: of the weights that are held.
        """
        self.before, self.after = before, after
        self.version = version
        self.wanted = wanted
        self.fits_beside = False
        """Whether memory suffices to lay the change out beside what is held."""
        self._missing = missing
        self._rows: dict[str, dict[int, torch.Tensor]] = {}
        """Rows of the missing ones, by parameter and expert."""
        self._readers: dict[str, tuple[CodesReader, Sequence[int]]] = {}
        """Readers of the missing experts' codes, and those experts, by parameter."""
        self._built: dict[str, dict[str, torch.nn.Parameter]] = {}
        """New parameters by the path of their module, if they were laid out before."""
        self._slots = None if slots is None else SlotChange(slots, before, after)

    def __repr__(self) -> str:
        return f"<_Change {self.before} -> {self.after}>"

    def take(
        self, paths: Sequence[str], experts: Sequence[Sequence[int]], rows: Mapping[str, torch.Tensor]
    ) -> None:
        """Take over experts that were read: parameter -> [experts of its layer, ...].

        ``paths``: of the modules, by layer.
        """
        for name, tensor in rows.items():
            of_layer = experts[paths.index(name.rpartition(".")[0])]
            self._rows.setdefault(name, {}).update(zip(of_layer, tensor, strict=True))
            if (reader := reader_of(tensor)) is not None:
                self._readers[name] = reader, of_layer

    def take_bytes(self, path: str, module: Any, expert: int, data: torch.Tensor) -> None:
        """Take over an expert that another member gave: bytes of its parameters."""
        begin = 0
        for name, parameter in expert_parameters(module):
            row = torch.empty(parameter.shape[1:], dtype=parameter.dtype)
            row.view(torch.uint8).view(-1).copy_(data[begin : begin + row.nbytes])
            begin += row.nbytes
            self._rows.setdefault(f"{path}.{name}", {})[expert] = row

    def build(
        self,
        layers: dict[str, Any],
        on_built: OnBuilt | None,
        should_stop: Callable[[], bool],
    ) -> None:
        """Lay out all new tensors beside the old ones.

        Raises:
            ReadingStopped: ``should_stop`` returned True.
        """
        if self._slots is not None and not self._slots.build(self._rows_in(layers), should_stop):
            raise ReadingStopped
        for number, (path, module) in enumerate(() if self._slots is not None else layers.items()):
            if should_stop():
                raise ReadingStopped
            before, after = self.before[number], self.after[number]
            if before != after:
                self._built[path] = self._parameters(number, path, module)
                if on_built is not None:
                    rows = [before.index(expert) if expert in before else -1 for expert in after]
                    on_built(module, self._built[path], rows)

    def install(self, layers: dict[str, Any]) -> list[torch.nn.Parameter]:
        """Give the modules their new tensors; returns the old ones."""
        if self._slots is not None:
            self._slots.install(self._rows_in(layers))
            return []
        replaced = []
        for number, (path, module) in enumerate(layers.items()):
            if self.before[number] == self.after[number]:
                continue
            parameters = self._built.get(path) or self._parameters(number, path, module)
            for name, parameter in parameters.items():
                replaced.append(getattr(module, name))
                setattr(module, name, parameter)
            module.num_experts = len(self.after[number])
        return replaced

    def _rows_in(self, layers: dict[str, Any]) -> Callable[[int, int], dict[str, torch.Tensor]]:
        """Finds the rows of a missing expert, by layer and number."""
        paths = list(layers)

        def rows_of(layer: int, expert: int) -> dict[str, torch.Tensor]:
            named = expert_parameters(layers[paths[layer]])
            return {name: self._rows[f"{paths[layer]}.{name}"][expert] for name, _ in named}

        return rows_of

    def _parameters(self, number: int, path: str, module: Any) -> dict[str, torch.nn.Parameter]:
        return {
            name: self._parameter(number, path, name, parameter)
            for name, parameter in expert_parameters(module)
        }

    def _parameter(
        self, number: int, path: str, name: str, parameter: torch.nn.Parameter
    ) -> torch.nn.Parameter:
        full = f"{path}.{name}"
        codes = self._codes(number, full, parameter)
        fresh = torch.nn.Parameter(self._tensor(number, full, parameter), requires_grad=False)
        if codes is not None:
            attach_expert_codes(fresh, name, codes)
        return fresh

    def _codes(self, number: int, full: str, parameter: torch.nn.Parameter) -> CodesReader | None:
        """Reader of the codes of these experts; None where one has none."""
        before, missing, held = self.before[number], self._missing[number], reader_of(parameter)
        read, experts = self._readers.get(full, (None, missing))
        found = [
            (read, experts.index(expert)) if expert in missing else (held, before.index(expert))
            for expert in self.after[number]
        ]
        known = [(reader, at) for reader, at in found if reader is not None]
        return CodesReader.of_experts(known) if len(known) == len(found) else None

    def _tensor(self, number: int, full: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The rows [after, ...] of one parameter, as it is typed and placed."""
        before, after, missing = self.before[number], self.after[number], self._missing[number]
        tensor = parameter.data.new_empty(len(after), *parameter.shape[1:])
        rows = self._rows.pop(full) if missing else None
        for row, expert in enumerate(after):
            if rows is not None and expert in missing:
                tensor[row].copy_(rows[expert])
            else:
                tensor[row].copy_(parameter.data[before.index(expert)])
        return tensor
