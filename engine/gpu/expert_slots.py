"""Slots of experts in tensors of fixed size, for devices.

A move writes experts into free slots of the same tensors, and changes a table. So a captured graph, which
reads both where they are, stays right without another capture. What a step reads is written at the change
only; what is free by then is filled before, in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from parallel.expert_parallel import SLOTS_ATTRIBUTE

SPARE_PART = 8
"""Divisor of the experts that are held: free slots beside them, at least one."""

Rows = Mapping[str, torch.Tensor]
"""An expert's row of each parameter, by name."""
ParametersOf = Callable[[Any], Sequence[tuple[str, torch.nn.Parameter]]]
"""Finds the parameters of a module that have a row for each expert, by name."""


class ExpertSlots:
    """Which slot of each layer's tensors has which expert."""

    def __init__(
        self, layers: Sequence[Any], experts: Sequence[Sequence[int]], most: int, parameters_of: ParametersOf
    ) -> None:
        """``layers``: modules that hold these experts, in order. ``most``: experts that are to be held."""
        self._layers, self._parameters_of = list(layers), parameters_of
        self._rows = [{expert: row for row, expert in enumerate(of_layer)} for of_layer in experts]
        self._tables: list[torch.Tensor] = []
        for module in self._layers:
            self._make_room(module, max(most, module.num_experts))
            slots = int(module.num_experts)
            (_, parameter), *_ = parameters_of(module)
            table = torch.full((slots + 1,), slots, device=parameter.device)
            setattr(module, SLOTS_ATTRIBUTE, table)
            self._tables.append(table)
        for layer, rows in enumerate(self._rows):
            self.set(layer, rows)

    def __repr__(self) -> str:
        return f"<ExpertSlots: {self.capacity} in each of {len(self._layers)} layers>"

    @property
    def capacity(self) -> int:
        """Slots of a layer, free ones included."""
        return min((int(module.num_experts) for module in self._layers), default=0)

    def row_of(self, layer: int, expert: int) -> int:
        """Slot of an expert that is held."""
        return self._rows[layer][expert]

    def free(self, layer: int, kept: Sequence[int]) -> list[int]:
        """Slots of a layer that have none of these experts."""
        taken = {self._rows[layer][expert] for expert in kept if expert in self._rows[layer]}
        return [row for row in range(int(self._layers[layer].num_experts)) if row not in taken]

    def write(self, layer: int, row: int, rows: Rows) -> None:
        """Put an expert into a slot that no step reads."""
        with torch.no_grad():
            for name, parameter in self._parameters_of(self._layers[layer]):
                parameter.data[row].copy_(rows[name])

    def set(self, layer: int, rows: Mapping[int, int]) -> None:
        """Have steps find these experts in these slots from now on."""
        self._rows[layer] = dict(rows)
        table, slots = self._tables[layer], int(self._layers[layer].num_experts)
        found = [rows[expert] for expert in sorted(rows)]
        table.copy_(torch.tensor([*found, *[slots] * (len(table) - len(found))]))

    def grow(self, layer: int, most: int) -> None:
        """Make room for so many experts, in other tensors: what was captured is stale."""
        module, before = self._layers[layer], self._tables[layer]
        self._make_room(module, most)
        self._tables[layer] = table = before.new_full((most + 1,), most)
        setattr(module, SLOTS_ATTRIBUTE, table)
        self.set(layer, self._rows[layer])

    def _make_room(self, module: Any, count: int) -> None:
        """Let a module's tensors have so many slots, the first ones with what they held."""
        for name, parameter in self._parameters_of(module):
            larger = parameter.data.new_zeros(count, *parameter.shape[1:])
            larger[: len(parameter)].copy_(parameter.data)
            setattr(module, name, torch.nn.Parameter(larger, requires_grad=False))
        module.num_experts = count


class SlotChange:
    """A change of the experts in slots: free ones are written before it happens."""

    def __init__(
        self, slots: ExpertSlots, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
    ) -> None:
        self._slots = slots
        self._before, self._after = before, after
        self._written: list[dict[int, int]] = [{} for _ in before]
        """Slots of experts that are there already, by layer."""

    def __repr__(self) -> str:
        return f"<SlotChange of {self._slots!r}>"

    def build(self, rows_of: Callable[[int, int], Rows], should_stop: Callable[[], bool]) -> bool:
        """Write what fits into free slots; False if it is not wanted any more.

        ``rows_of``: what was read of an expert, by layer and number.
        """
        for layer, (before, after) in enumerate(zip(self._before, self._after, strict=True)):
            if should_stop():
                return False
            missing = [expert for expert in after if expert not in before]
            for expert, row in zip(missing, self._slots.free(layer, before), strict=False):
                self._slots.write(layer, row, rows_of(layer, expert))
                self._written[layer][expert] = row
        return True

    def install(self, rows_of: Callable[[int, int], Rows]) -> None:
        """Write the rest into slots that become free, between two steps, and change the tables."""
        for layer, (before, after) in enumerate(zip(self._before, self._after, strict=True)):
            if before == after:
                continue
            if len(after) > len(self._slots.free(layer, ())):
                self._slots.grow(layer, len(after))
            kept = [expert for expert in after if expert in before]
            rows = {expert: self._slots.row_of(layer, expert) for expert in kept} | self._written[layer]
            free = [row for row in self._slots.free(layer, kept) if row not in rows.values()]
            for expert, row in zip((each for each in after if each not in rows), free, strict=False):
                self._slots.write(layer, row, rows_of(layer, expert))
                rows[expert] = row
            self._slots.set(layer, rows)


def slots_for(most: int, num_experts: int) -> int:
    """Slots of a layer that holds so many experts, free ones included."""
    return min(num_experts, most + max(1, most // SPARE_PART))
