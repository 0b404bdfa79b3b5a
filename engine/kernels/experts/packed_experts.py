"""Native products of the experts held here, for rows from any member."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from engine.attention.base import Int64s
from engine.host.background import let_go
from engine.kernels.adapters.sites import PackedSite, TaggedAdapters
from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.operations import AS_FLOAT, WITHIN, OperationKind, OperationList, StepArguments
from engine.kernels.core.pages import Arena
from engine.kernels.core.rows import SLACK, bytes_pitch, pitch_of, spaced
from engine.kernels.experts.form import ExpertForm, first_of, form_of
from engine.kernels.products.packing import PackedWeights, Packer, add_rounding
from parallel.parts import parts_here

ExpertAdapters: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Writers of adapters' first product beside an expert's two; they return the second's record."""


def _nothing(_rows: Any) -> None:
    """Writer where rows have no adapters."""


@dataclass(frozen=True)
class PackedExperts:
    """The experts of a layer, laid out for the kernels."""

    up: PackedWeights
    down: PackedWeights
    count: int
    form: ExpertForm
    biases: tuple[torch.Tensor, torch.Tensor] | None
    """See :meth:`~engine.kernels.experts.form.ExpertForm.biases`."""

    @classmethod
    def of(cls, module: Any, form: ExpertForm, packer: Packer, ranks: int = 1) -> PackedExperts:
        """Pack the weights of an experts module; ``ranks`` have a part of each."""
        if not form.has_gate:
            inward, down = packer.panels(getattr(module, form.first)), module.down_proj
        elif form.is_interleaved or form.is_transposed:
            gate, up, down = form.weights(module)
            inward = packer.gate_and_up(gate, up)
        else:
            inward, down = packer.gate_up_stack(module.gate_up_proj), module.down_proj
        laid = packer.panels(down, multiple=32, parts=parts_here(form.width, ranks))
        return cls(inward, laid, len(down), form, form.biases(module))

    def with_others(self, rows: Sequence[int], others: PackedExperts | None) -> PackedExperts | None:
        """Some of these experts, and others, which are not packed anew.

        ``rows``: in the order wanted, the number of each of these experts, or -1 for the next one of the
        others. None if they do not lie in tensors of their own, as codes do. Biases are left out.
        """
        parts = [(self.up, others and others.up), (self.down, others and others.down)]
        laid = [_rows_of(mine, theirs, rows) for mine, theirs in parts]
        up, down = laid
        if up is None or down is None:
            return None
        return PackedExperts(up, down, len(rows), self.form, None)

    def write(
        self,
        operations: OperationList,
        rows: Any,
        middle: Any,
        out: Any,
        begins: Any,
        ranks: int = 1,
        *,
        as_float: bool = False,
        rounded: torch.Tensor | None = None,
        adapted: ExpertAdapters | None = None,
    ) -> None:
        """Add the two products to a list of operations.

        Rows [n, hidden] are sorted by expert: number i has those from ``begins[i]`` on. They go through
        ``middle`` [n, width] to ``out`` [n, hidden]. All three lie as
        :mod:`engine.kernels.core.rows` describes; rows and middle can be read ``SLACK`` rows beyond. Where
        ``ranks`` have a part of each expert, or other experts (``as_float``), out is float32 [n, hidden],
        side by side, to be added to theirs.
        ``rounded``: room for rows of the wider kind, where weights want them in 8 bits. ``adapted``: writes
        what adapters add to both.
        """
        shared, form, activation = {"extra": begins, "a": self.count}, self.form, self.form.activation
        up_bias, down_bias = self.biases or (None, None)
        assert ranks == 1 or self.biases is None
        before, behind = adapted or (_nothing, _nothing)
        added = before(rows)
        operations.add(
            OperationKind.EXPERTS_UP,
            added=added,
            into=add_rounding(operations, self.up, rows, rounded, form.hidden, **shared),
            out=middle,
            weights=self.up,
            more=up_bias,
            factors=activation.numbers,
            b=activation.kind,
            n=form.width,
            k=form.hidden,
            flags=0 if form.has_gate else WITHIN,
            **shared,
        )
        added = behind(middle)
        operations.add(
            OperationKind.EXPERTS_DOWN,
            added=added,
            into=add_rounding(operations, self.down, middle, rounded, form.width, **shared),
            out=out,
            weights=self.down,
            more=down_bias,
            n=form.hidden,
            k=form.width,
            b=parts_here(form.width, ranks),
            flags=AS_FLOAT if ranks > 1 or as_float else 0,
            **shared,
        )


def _rows_of(mine: PackedWeights, theirs: PackedWeights | None, rows: Sequence[int]) -> torch.Tensor | None:
    """Panels [rows, ...] out of two tensors; the next of ``theirs`` for each -1."""
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor | None):
        return None
    laid = Arena().zeros((len(rows), *mine.shape[1:]), mine.dtype)
    fresh = iter(()) if theirs is None else iter(theirs)
    for out, row in zip(laid, rows, strict=True):
        out.copy_(mine[row] if row >= 0 else next(fresh))
    return laid


class NativeExperts:
    """Native replacement of :class:`parallel.expert_products.ExpertProducts`."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self._packer = Packer(library)
        self._packed: dict[int, tuple[weakref.ref[torch.Tensor], PackedExperts]] = {}
        """By module: the weight that was packed."""
        self._ready: dict[int, tuple[weakref.ref[torch.Tensor], PackedExperts]] = {}
        """By weight, those that a module will get."""
        self._sites: dict[int, Sequence[PackedSite | None]] = {}
        """Adapters of the two products by module."""
        self.tagged: TaggedAdapters | None = None
        """Adapters that rows may have; None: they have none."""

    def adapt(self, module: Any, sites: Sequence[PackedSite | None], tagged: TaggedAdapters) -> None:
        """Add what adapters give to a module's two products from now on."""
        self._sites[id(module)], self.tagged = sites, tagged

    def prepare(self, module: Any, parameters: Mapping[str, torch.nn.Parameter], rows: Sequence[int]) -> None:
        """Pack weights that a module will get, while steps run in another thread.

        ``rows``: where the module has each of these experts now, or -1. What is packed already is copied.
        """
        weight = parameters[first_of(has_gate=module.has_gate)]
        if not len(weight):
            return
        packed = self._packed_in_part(module, parameters, rows) or self._pack(module, parameters)
        dead = [key for key, (known, _) in list(self._ready.items()) if known() is None]
        for key in dead:
            self._ready.pop(key, None)
        self._ready[id(weight)] = weakref.ref(weight), packed

    def _packed_in_part(
        self, module: Any, parameters: Mapping[str, torch.nn.Parameter], rows: Sequence[int]
    ) -> PackedExperts | None:
        """See :meth:`prepare`; None if all have to be packed."""
        known = self._packed.get(id(module))
        if known is None or known[0]() is not _first(module):
            return None
        new = [number for number, row in enumerate(rows) if row < 0]
        if len(new) == len(rows) or not isinstance(known[1].up, torch.Tensor):
            return None
        fresh = None
        if new:
            some = {
                name: torch.nn.Parameter(each[new], requires_grad=False) for name, each in parameters.items()
            }
            fresh = self._pack(module, some)
        found = known[1].with_others(rows, fresh)
        biases = known[1].form.biases(_with(module, parameters))
        return None if found is None else replace(found, biases=biases)

    def _pack(self, module: Any, parameters: Mapping[str, torch.nn.Parameter]) -> PackedExperts:
        stand_in = _with(module, parameters)
        return PackedExperts.of(stand_in, form_of(stand_in), Packer(self._library))

    def packed(self, module: Any) -> PackedExperts:
        """The module's weights, packed when they are seen for the first time."""
        weight = _first(module)
        known = self._packed.get(id(module))
        if known is not None and known[0]() is weight:
            return known[1]
        if known is not None:
            let_go([laid for laid in (known[1].up, known[1].down) if isinstance(laid, torch.Tensor)])
        ready = self._ready.pop(id(weight), None)
        if ready is not None and ready[0]() is weight:
            self._packed[id(module)] = ready
            return ready[1]
        packed = PackedExperts.of(module, form_of(module), self._packer)
        self._packed[id(module)] = (weakref.ref(weight), packed)
        return packed

    def give_back(self) -> None:
        """Let go of all that is packed, between two steps."""
        self._packed, self._ready = {}, {}

    def compute(
        self,
        module: Any,
        rows: torch.Tensor,
        counts: Sequence[int],
        tags: Int64s | None = None,
        held: Int64s | None = None,
    ) -> torch.Tensor:
        """Outputs [n, H] of rows [n, H] that are sorted by expert.

        The first ``counts[0]`` rows go through the module's expert 0, and so on. ``tags`` [n] of their
        adapters, and ``held``, the numbers of the experts here; None: rows have no adapters.
        """
        packed = self.packed(module)
        number = len(rows)
        begins = np.zeros(packed.count + 1, dtype=np.int64)
        np.cumsum(counts, out=begins[1:])
        middle = rows.new_empty(number + SLACK, pitch_of(packed.form.width, rows.dtype))
        result = rows.new_empty(number, pitch_of(packed.form.hidden, rows.dtype))
        widest = max(packed.form.width, packed.form.hidden)
        rounded = torch.empty(number + SLACK, bytes_pitch(widest), dtype=torch.uint8)
        operations = OperationList(6)
        adapted = (
            None if tags is None or held is None else self._adapted(module, operations, begins, tags, held)
        )
        packed.write(operations, spaced(rows), middle, result, begins, rounded=rounded, adapted=adapted)
        operations.run(self._library, StepArguments(), rows.dtype)
        return result[:, : packed.form.hidden].contiguous()

    def _adapted(
        self, module: Any, operations: OperationList, begins: Int64s, tags: Int64s, held: Int64s
    ) -> ExpertAdapters | None:
        """Writers of adapters' first products; None if no row has one."""
        if self.tagged is None or not tags.any():
            return None
        numbers = torch.from_numpy(self.tagged.numbers_of(tags))

        def writer(site: PackedSite | None) -> Callable[[Any], Any]:
            if site is None:
                return _nothing
            low = torch.empty(len(numbers), site.low_width)
            record = site.record(low, numbers, held)

            def write(rows: Any) -> np.ndarray[Any, Any]:
                shape = {"n": site.low_width, "k": site.site.inputs, "a": len(held)}
                operations.add(OperationKind.ADAPT_EXPERTS, into=rows, extra=record, more=begins, **shape)
                operations.keep(low, numbers, held)
                return record

            return write

        up, down = self._sites[id(module)]
        return writer(up), writer(down)


def _first(module: Any) -> torch.nn.Parameter:
    """Weights of the first product of experts, by whose identity they are known."""
    found: torch.nn.Parameter = getattr(module, first_of(has_gate=module.has_gate))
    return found


def _with(module: Any, parameters: Mapping[str, torch.nn.Parameter]) -> Any:
    """A module like this one, with other experts."""
    stand_in = copy.copy(module)
    stand_in.__dict__["_parameters"] = {**module._parameters, **parameters}
    return stand_in


def combine(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sums of expert outputs, with the bits of COMBINE.

    Outputs [n * k, H], weights [n, k] -> [n, H] in float32. Each choice is added by a multiply-add: products
    of bfloat16 are exact in float32, those of float32 in float64.
    """
    total = outputs.new_zeros(len(weights), outputs.shape[1], dtype=torch.float32)
    by_choice = outputs.view(*weights.shape, outputs.shape[1]).unbind(1)
    for output, weight in zip(by_choice, weights[:, :, None].unbind(1), strict=True):
        if output.dtype == torch.float32:
            total = total.double().addcmul_(output.double(), weight.double()).float()
        else:
            total.addcmul_(output.float(), weight)
    return total
