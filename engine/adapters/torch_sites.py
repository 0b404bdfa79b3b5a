"""Layers that torch computes, beside which low-rank adapters add something.

The counterpart of :class:`engine.kernels.adapters.sites.Sites` for models without native kernels: a hook
behind each layer. Rows are sorted by adapter, and those of one go through its two matrices together. What
they give is added in float32 before the sum is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import PLAN_KEYWORD, Int64s, PackedRows, PagedAttention
from engine.kernels.adapters.sites import AdapterRoom, LowRank, SiteKey, sorted_rows
from engine.model.probe import run_stage
from engine.model.weights import LoadedModel
from engine.states.held import StateRows

Groups = list[tuple[int, torch.Tensor]]
"""Numbers of adapters, and the indices of their rows."""
COUNTS = 6, 5
"""Tokens of the two requests of a trial."""
SPREAD = "experts"
"""Name of modules below which a layer sees other rows than the step has."""


class TorchSites:
    """Layers of a model beside which adapters add something, each with a hook."""

    spread_keys: frozenset[SiteKey] = frozenset()
    """As of :class:`.Sites`: there are none."""

    def __init__(self, model: LoadedModel, room: AdapterRoom, seen: Mapping[Any, bool]) -> None:
        """``seen``: the layers, and whether each sees only the rows whose logits are wanted."""
        self.room = room
        self._model = model
        self._parts: dict[int, dict[SiteKey, LowRank]] = {}
        self._groups: dict[bool, Groups] = {False: [], True: []}
        """All rows of the step, and those whose logits are wanted."""
        self.keys = {(id(module), "") for module in seen}
        """Keys of the layers."""
        for module, sees_wanted in seen.items():
            module.register_forward_hook(partial(self._adapt, sees_wanted))

    def __repr__(self) -> str:
        return f"<TorchSites: {len(self.keys)} layers>"

    def put(self, number: int, parts: Mapping[SiteKey, LowRank], tag: int = 0) -> int:
        """Take an adapter in place of an earlier one of this number; returns its bytes.

        No step may run meanwhile. ``tag``: as of :meth:`.Sites.put`, not used.
        """
        dtype, device = self._model.dtype, self._model.device
        self._parts[number] = found = {
            key: part._replace(
                a=(part.a.mT if part.of_tokens else part.a).to(device, dtype).contiguous(),
                b=part.b.to(device, dtype).contiguous(),
            )
            for key, part in parts.items()
        }
        return sum(part.a.nbytes + part.b.nbytes for part in found.values())

    @contextmanager
    def step(self, numbers: Int64s, wanted: Int64s) -> Iterator[None]:
        """Context in which the model computes a step.

        ``numbers`` [tokens]: adapter of each, 0 for none; ``wanted``: indices of those with logits.
        """
        self._groups = {False: self._grouped(numbers), True: self._grouped(numbers[wanted])}
        try:
            yield
        finally:
            self._groups = {False: [], True: []}

    def _grouped(self, numbers: Int64s) -> Groups:
        """Rows of each adapter."""
        order = sorted_rows(numbers).order
        of_rows = numbers[order]
        return [
            (int(number), torch.from_numpy(order[of_rows == number]).to(self._model.device))
            for number in np.unique(of_rows)
        ]

    def _adapt(
        self, sees_wanted: bool, module: Any, given: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor:
        """Add what adapters give for a layer's rows; called by torch behind the layer."""
        if not (groups := self._groups[sees_wanted]):
            return output
        inputs, sums = given[0], output.reshape(-1, output.shape[-1])
        for number, rows in groups:
            part = self._parts[number].get((id(module), ""))
            if part is None:
                continue
            if part.of_tokens:
                low = F.embedding(inputs.reshape(-1).index_select(0, rows), part.a)
            else:
                low = F.linear(inputs.reshape(-1, inputs.shape[-1]).index_select(0, rows), part.a)
            # on what an embedding gives there may be a factor, which is in ``output`` already
            factor = part.scaling * float(getattr(module, "embed_scale", 1.0))
            added = F.linear(low, part.b).float() * factor
            sums[rows] = (sums.index_select(0, rows).float() + added).to(sums.dtype)
        return sums.view_as(output)


def make_sites(
    model: LoadedModel, room: AdapterRoom, make_cache: Callable[[int], PagedAttention], block_size: int
) -> TorchSites:
    """Sites of the layers that see a row for each one of a step.

    A trial finds them among linear layers and embeddings. Layers of single experts see others, those of
    recurrent states padded ones. ``make_cache`` makes a cache of so many blocks. All workers of a model run
    this together.
    """
    counts, wanted = np.array(COUNTS), 2
    pages = -(-max(COUNTS) // block_size)
    tables = np.arange(2 * pages, dtype=np.int32).reshape(2, pages)
    positions = np.concatenate([np.arange(count) for count in COUNTS])
    packed = PackedRows(np.zeros(2, np.int64), counts, tables, positions, 0)
    ids = torch.from_numpy(positions * 7919 % model.vocab_size).to(model.device)
    calls: dict[Any, set[int]] = {}

    def note(module: Any, given: tuple[Any, ...], _output: Any) -> None:
        shape = given[0].shape if isinstance(module, torch.nn.Embedding) else given[0].shape[:-1]
        calls.setdefault(module, set()).add(shape.numel())

    layers = [
        module
        for name, module in model.module.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and SPREAD not in name.split(".")
    ]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    arguments = {"logits_to_keep": torch.arange(wanted), PLAN_KEYWORD: make_cache(2 * pages).plan(packed)}
    try:
        rows = StateRows([0, 1], [0, 0], [*COUNTS])
        states = nullcontext() if model.states is None else model.states.step(rows)
        with torch.inference_mode(), states:
            run_stage(
                model.module, model.stage, ids, torch.from_numpy(positions).to(model.device), **arguments
            )
    finally:
        for hook in hooks:
            hook.remove()
        if model.states is not None:
            model.states.running.clear()
    sums = {sum(COUNTS): False, wanted: True}
    found = {
        layer: sums[next(iter(rows))]
        for layer, rows in calls.items()
        if len(rows) == 1 and rows <= sums.keys()
    }
    return TorchSites(model, room, found)
