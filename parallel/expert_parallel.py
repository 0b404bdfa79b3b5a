"""Experts spread over the ranks of a group: dispatch, local experts, combine.

A model's expert layer asks for some (token, expert) pairs. Each pair's hidden state goes to the rank that
holds the expert, is computed there in one grouped product with everybody else's, and the result comes
home, where a token's expert outputs are weighted and summed in top-k order. So the sum does not depend
on how many ranks there are or where an expert lives.

Two ways of dispatch between CPUs, both with the row counts of all ranks known from the step's headers:

- ``allgather_reducescatter``: everybody gets all tokens and their routing, computes the pairs of its own
  experts, and sends each result home. Every pair is computed once, so the reduction over ranks has one
  term per row, and both sides know the sizes: two collectives per layer.
- ``all_to_all``: only the pairs of a rank's experts are sent to it. Less data with many ranks, but the
  counts have to be exchanged first: three collectives per layer.

Between devices whose group carries their tensors, each rank sums up what its experts add to a token, and the
sums are added by rank: two collectives per layer, and nothing passes through the host. Where experts move
(``adds_by_choice``) the results of all pairs go home instead, as they do between CPUs.

The way in is transformers' experts interface: :func:`expert_forward` is registered under one name and
finds its :class:`ExpertParallel` on the module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from parallel.communicators.base import Communicator, carries
from parallel.device_tables import DeviceTables
from parallel.expert_products import ExpertProducts
from parallel.placement import Placement
from parallel.replicas import Ints, line, replicas_at
from parallel.sliced_experts import TokenSlices

Dispatch = Literal["allgather_reducescatter", "all_to_all"]

ATTRIBUTE = "lockstep_experts"
"""Attribute of an experts module that holds its :class:`ExpertParallel`."""
LAYER_ATTRIBUTE = "lockstep_expert_layer"
"""Attribute of an experts module with its number among those of the :class:`ExpertParallel`."""

SLOTS_ATTRIBUTE = "lockstep_expert_slots"
"""Attribute of an experts module whose experts have slots in tensors of fixed size.

It is the slot of each local number; numbers behind the last one held get that behind the last slot.
"""

_LARGE = 256 << 10
"""Result size in bytes from which one combined transfer pays for its extra calls.

Smaller results are moved twice.
"""

LocalExperts = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(experts module, hidden [n, H], expert numbers [n, 1], weights [n, 1]) -> [n, H]"""


Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Weighted sum of each token's expert outputs.

(outputs [n * k, H], weights [n, k]) -> [n, H].
"""


class Products(Protocol):
    """Computes local experts on the CPU."""

    def compute(
        self, module: Any, rows: torch.Tensor, counts: Sequence[int], tags: Any = None, held: Any = None
    ) -> torch.Tensor:
        """See :meth:`parallel.expert_products.ExpertProducts.compute`."""
        ...


class RoutedRows(NamedTuple):
    """Rows of this rank, and where they go."""

    hidden: torch.Tensor
    """[tokens, H]"""
    expert_ids: torch.Tensor
    """[tokens, k]"""
    tags: torch.Tensor | None
    """[tokens] of the rows' adapters, or 0."""


class Times:
    """Seconds of the last step's dispatch, expert computation and combine, over all layers."""

    def __init__(self) -> None:
        self.dispatch = self.experts = self.combine = 0.0

    def reset(self) -> None:
        self.dispatch = self.experts = self.combine = 0.0


class ExpertParallel:
    """Expert parallelism of one rank: dispatch, local experts and combine, over all layers.

    Until :meth:`join` gives it a group, pairs of experts that are elsewhere count as zero: that is enough
    to find out the shapes of a model while it is loaded.

    Where pairs go is worked out in numpy on the host: for the few hundred numbers of a step that is faster
    than small torch calls, and the collectives need the counts on the host anyway. Where communicators carry
    CPU tensors only, those of another device travel through the host's memory.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        dispatch: Dispatch,
        local_experts: LocalExperts,
        num_layers: int = 1,
        slices: TokenSlices | None = None,
    ) -> None:
        """``local_experts`` computes on devices other than the CPU. ``num_layers``: counted apart.

        ``slices``: the tokens that this rank of an instance with tensor parallelism dispatches; None: all.
        """
        self.times = Times()
        self._slices = slices
        self._dispatch = dispatch
        self._local_experts = local_experts
        self._products: Products = ExpertProducts()
        self.adds_by_choice = False
        """Whether a token's results go home unsummed, so that moves of experts change no bit."""
        self._num_layers = num_layers
        self._tables: DeviceTables | None = None
        self._counts: torch.Tensor | None = None
        """Pairs computed on a device by layer and expert, since they were last taken."""
        self._set_placement(placement, rank)
        self._group: Communicator | None = None
        self.signature = 0
        """Signature of native kernels that exchange rows inside a step; 0: none."""
        self._signatures: list[int] | None = None
        self.sizes: Sequence[int] = ()
        """Tokens of each rank in this step."""
        self._line: Sequence[int] = (0,)
        self.tokens_per_expert = np.zeros((num_layers, placement.num_experts), dtype=np.int64)
        """Pairs computed here [layers, experts], over all steps."""

    def __repr__(self) -> str:
        return f"<ExpertParallel rank {self.rank} of {self.placement.num_ranks}, {self._dispatch}>"

    @property
    def group(self) -> Communicator | None:
        """The group of the current epoch; None while the model is loaded."""
        return self._group

    def join(self, group: Communicator, placement: Placement) -> None:
        """Switch to a new group and expert placement, from the next step on.

        The group before is left to its owner. The modules must hold the experts of this rank in the group by
        then.
        """
        if placement.num_ranks != group.size or placement.num_experts != self.placement.num_experts:
            raise ValueError(f"{placement} does not fit {group!r}")
        if placement.num_layers not in (None, len(self.tokens_per_expert)):
            raise ValueError(f"{placement} is not for {len(self.tokens_per_expert)} layers")
        self.take_counts()
        self._set_placement(placement, group.rank)
        self._group = group
        self.signature, self._signatures = 0, None

    def _set_placement(self, placement: Placement, rank: int) -> None:
        self.placement = placement
        self.rank = rank
        self._replicas = replicas_at(placement, rank)
        if self._tables is not None and not self._tables.fill(self._replicas):
            self._tables = None

    def use_products(self, products: Products) -> None:
        """Compute the experts held here with these products from now on."""
        self._products = products

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin a step in which rank r has ``sizes[r]`` tokens in every layer.

        With slices, instance i has ``sizes[i]``. Before the first one of a group with links all tell each
        other their :attr:`signature`.
        """
        self.sizes = sizes if self._slices is None else self._slices.sizes(sizes)
        self._line = line(self.sizes)
        self.times.reset()
        if self._signatures is None and self._group is not None and hasattr(self._group, "links_address"):
            self._signatures = [number for (number,) in self._group.all_gather_ints([self.signature])]

    @property
    def have_one_signature(self) -> bool:
        """Whether all members of a group with links have the same signature.

        The answer is the same at all members.
        """
        signatures = self._signatures or [0]
        return signatures[0] != 0 and len(set(signatures)) == 1

    def forward(
        self,
        module: Any,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        combine: Combine | None = None,
        tags: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute one expert layer: hidden [tokens, H], expert_ids and weights [tokens, k] -> [tokens, H].

        With zero tokens it only takes part in what the others need. ``combine`` sums up at home; None does it
        as transformers does, in the type of ``hidden``. All ranks with slices have the same arguments.
        ``tags`` [tokens] name the adapters of rows on the CPU, or 0; None: at all ranks, always.
        """
        slices = self._slices
        if slices is None:
            return self._forward(module, hidden, expert_ids, weights, combine, tags)
        if self._group is None:  # being loaded: what this instance holds counts, wherever a token stands
            return slices.summed(self._forward(module, hidden, expert_ids, weights, combine, tags))
        return slices.gathered(
            len(hidden),
            lambda mine: self._forward(
                module,
                hidden[mine],
                expert_ids[mine],
                weights[mine],
                combine,
                None if tags is None else tags[mine],
            ),
        )

    def _forward(
        self,
        module: Any,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        combine: Combine | None,
        tags: torch.Tensor | None,
    ) -> torch.Tensor:
        """One layer of this rank's tokens."""
        on_device = self._group is not None and self._adds_on_device(self._group, hidden)
        if self._group is not None and on_device and not self.adds_by_choice:
            return self._on_device(module, self._group, hidden, expert_ids, weights)
        if self._group is not None and on_device:
            outputs = self._all_on_device(module, self._group, hidden, expert_ids)
        elif self._group is None or self._group.size == 1:
            outputs = self._compute_alone(module, hidden, expert_ids, tags)
        elif self._dispatch == "all_to_all":
            outputs = self._all_to_all(module, self._group, RoutedRows(hidden, expert_ids, tags))
        else:
            outputs = self._all_gather(module, self._group, RoutedRows(hidden, expert_ids, tags))
        return _sum_at_home(outputs, weights, hidden) if combine is None else combine(outputs, weights)

    # ---- ways of dispatch; each returns the unweighted outputs of this rank's pairs [tokens * k, H]

    def _compute_alone(
        self, module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, tags: torch.Tensor | None
    ) -> torch.Tensor:
        flat = _to_host(expert_ids).reshape(-1)
        places = np.arange(len(flat)) // expert_ids.shape[1]
        mine = (self._owners(module, flat, places, len(hidden)) == self.rank).nonzero()[0]
        outputs = hidden.new_zeros(len(flat), hidden.shape[1])
        known = None if tags is None else _to_host(tags)
        tokens = mine // expert_ids.shape[1]
        outputs[_like(hidden, mine)] = self._compute(module, hidden, tokens, flat[mine], known)
        return outputs

    def _all_gather(self, module: Any, group: Communicator, given: RoutedRows) -> torch.Tensor:
        began = time.perf_counter()
        hidden, expert_ids, tags = given
        top_k = expert_ids.shape[1]
        packed = _on_host(_pack(hidden, expert_ids, tags))
        gathered = group.all_gather_view(packed, self.sizes)  # read before the combine
        all_hidden, all_ids, all_tags = _unpack(gathered, hidden, top_k)
        flat = all_ids.reshape(-1)
        owners = self._owners(module, flat, np.arange(len(flat)) // top_k, len(all_ids))
        mine = (owners == self.rank).nonzero()[0]
        # Results in pair order are in the order of home ranks; how many go to each and come from each
        # follows from the routing, which is here.
        ends = [end * top_k for end in self._line[1:]]
        upto = [0, *mine.searchsorted(ends).tolist()]
        send = [after - before for before, after in pairwise(upto)]
        own = owners[ends[self.rank] - expert_ids.numel() : ends[self.rank]]
        receive = np.bincount(own, minlength=group.size).tolist()
        arrived = time.perf_counter()
        computed = self._compute(module, all_hidden, mine // top_k, flat[mine], all_tags)
        done = time.perf_counter()
        outputs = _bring_home(group, computed, send, receive, own.argsort(kind="stable"))
        self._note(began, arrived, done)
        return outputs

    def _all_to_all(self, module: Any, group: Communicator, given: RoutedRows) -> torch.Tensor:
        began = time.perf_counter()
        hidden, expert_ids, tags = given
        flat = _to_host(expert_ids).reshape(-1)
        places = self._line[self.rank] + np.arange(len(flat)) // expert_ids.shape[1]
        owners = self._owners(module, flat, places, self._line[-1])
        order = owners.argsort(kind="stable")
        send = np.bincount(owners, minlength=group.size).tolist()
        counts = group.all_gather_ints(send)
        receive = [row[self.rank] for row in counts]
        on_device = _like(hidden, order)
        pairs = hidden.index_select(0, on_device // expert_ids.shape[1])
        of_pairs = None if tags is None else tags.index_select(0, on_device // expert_ids.shape[1])
        packed = _on_host(_pack(pairs, expert_ids.reshape(-1, 1).index_select(0, on_device), of_pairs))
        rows, ids, known = _unpack(group.all_to_all(packed, send, receive), hidden, 1)
        arrived = time.perf_counter()
        computed = self._compute(module, rows, np.arange(len(ids)), ids[:, 0], known)
        done = time.perf_counter()
        outputs = _bring_home(group, computed, receive, send, order)
        self._note(began, arrived, done)
        return outputs

    def _adds_on_device(self, group: Communicator, hidden: torch.Tensor) -> bool:
        """Whether the group carries a device's tensors, and sums can be taken there."""
        can_add = self.adds_by_choice or not self.placement.replicas
        return can_add and not hidden.is_cpu and carries(group, hidden)

    def _on_device(
        self,
        module: Any,
        group: Communicator,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one expert layer on a device, without tensors passing through the host.

        All tokens come here, and each rank's partial sums go home.

        Sizes are known from the headers, so nothing is read back. Terms are added by rank, not by choice.
        """
        began = time.perf_counter()
        width, top_k = hidden.shape[1], expert_ids.shape[1]
        packed = torch.cat(
            [_pack(hidden, expert_ids), weights.float().contiguous().view(hidden.dtype)], dim=1
        )
        gathered = group.all_gather_view(packed, self.sizes)
        if not len(gathered):
            return hidden
        ids, shares = gathered[:, width:].contiguous().view(torch.int32).split(top_k, dim=1)
        local, is_mine = self._tables_on(hidden.device).local(_layer_of(module), ids)
        shares = shares.contiguous().view(torch.float32).masked_fill(~is_mine, 0.0)
        arrived = time.perf_counter()
        module._is_expert_parallel = True  # for transformers' own functions: numbers beyond the last are none
        at = _slots_of(module, local)
        partial = self._local_experts(module, gathered[:, :width], at, shares.to(weights.dtype))
        self._count(_layer_of(module), ids, is_mine)
        done = time.perf_counter()
        total = group.reduce_scatter(partial, self.sizes)
        self._note(began, arrived, done)
        return total

    def _all_on_device(
        self, module: Any, group: Communicator, hidden: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        """:meth:`_all_gather` on devices; k times as much goes home as with :meth:`_on_device`.

        Of the ranks one has a pair's result and the others zeros, so where an expert is changes no bit.
        """
        began = time.perf_counter()
        width, top_k = hidden.shape[1], expert_ids.shape[1]
        gathered = group.all_gather_view(_pack(hidden, expert_ids), self.sizes)
        if not len(gathered):
            return hidden
        arrived = time.perf_counter()
        ids = gathered[:, width:].contiguous().view(torch.int32)
        computed = self.by_choice(module, gathered[:, :width], ids)
        done = time.perf_counter()
        outputs = group.reduce_scatter(computed, [size * top_k for size in self.sizes])
        self._note(began, arrived, done)
        return outputs

    def by_choice(self, module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Outputs [tokens * k, H] of all members' pairs, zeros where another rank serves.

        Reads nothing back and keeps to memory that stays, so that it can be captured.
        """
        layer, top_k = _layer_of(module), expert_ids.shape[1]
        local, is_mine = self._tables_on(hidden.device).serving(layer, expert_ids, self.rank)
        module._is_expert_parallel = True  # for transformers' own functions: numbers beyond the last are none
        rows = hidden[:, None].expand(-1, top_k, -1).reshape(-1, hidden.shape[1])
        shares = is_mine.reshape(-1, 1).to(hidden.dtype)
        computed = self._local_experts(module, rows, _slots_of(module, local).reshape(-1, 1), shares)
        self._count(layer, expert_ids, is_mine)
        return computed

    def _tables_on(self, device: torch.device) -> DeviceTables:
        if self._tables is None:
            self._tables = DeviceTables(self._replicas, self._num_layers, device)
        return self._tables

    def _count(self, layer: int, expert_ids: torch.Tensor, is_mine: torch.Tensor) -> None:
        """Count the pairs of a layer that are computed here, on their device."""
        num_experts = self.placement.num_experts
        if self._counts is None:
            shape = self._num_layers, num_experts + 1
            self._counts = torch.zeros(shape, dtype=torch.int64, device=expert_ids.device)
        flat = torch.where(is_mine, expert_ids.long(), num_experts).reshape(-1)
        self._counts[layer].index_add_(0, flat, torch.ones_like(flat))

    def take_counts(self) -> None:
        """Add what was counted on a device to :attr:`tokens_per_expert`; waits for the device."""
        if self._counts is not None:
            with torch.inference_mode():  # as in the step that made them
                self.tokens_per_expert += _to_host(self._counts)[:, :-1]
                self._counts.zero_()

    # ---- helpers

    def _owners(self, module: Any, experts: Ints, places: Ints, total: int) -> Ints:
        """Rank that serves each (token, expert) pair; ``places`` index all ``total`` tokens."""
        return self._replicas.owners(_layer_of(module), experts, places, total)

    def _compute(
        self, module: Any, hidden: torch.Tensor, tokens: Ints, expert_ids: Ints, tags: Ints | None
    ) -> torch.Tensor:
        """Outputs [n, H] of pairs: hidden[tokens[i]] at expert expert_ids[i], all of which are held here."""
        number = _layer_of(module)
        at = self._replicas.row_of(number)
        local = self._replicas.numbers[at, expert_ids]
        counts = np.bincount(local, minlength=len(self._replicas.mine[at]))
        self.tokens_per_expert[number][self._replicas.mine[at]] += counts
        if not len(local):
            return hidden.new_empty(0, hidden.shape[1])
        order = local.argsort(kind="stable")
        rows = hidden.index_select(0, _like(hidden, tokens[order]))
        if hidden.device.type == "cpu":
            held = np.asarray(self._replicas.mine[at], np.int64)
            adapted = () if tags is None else (tags[tokens[order]], held)
            outputs = self._products.compute(module, rows, counts.tolist(), *adapted)
        else:
            numbers = _slots_of(module, _like(hidden, local[order]))[:, None]
            outputs = self._local_experts(module, rows, numbers, rows.new_ones(len(rows), 1))
        return outputs.index_select(0, _like(hidden, _inverse(order)))

    def _note(self, began: float, arrived: float, done: float) -> None:
        self.times.dispatch += arrived - began
        self.times.experts += done - arrived
        self.times.combine += time.perf_counter() - done


def expert_forward(
    module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Forward function for transformers' expert layers; the module knows its group."""
    parallel: ExpertParallel = getattr(module, ATTRIBUTE)
    return parallel.forward(module, hidden, expert_ids, weights)


def _layer_of(module: Any) -> int:
    """Number of an experts module among those of its :class:`ExpertParallel`."""
    return int(getattr(module, LAYER_ATTRIBUTE, 0))


def _slots_of(module: Any, local: torch.Tensor) -> torch.Tensor:
    """Rows of a module's tensors for local numbers: these, unless its experts have slots."""
    slots: torch.Tensor | None = getattr(module, SLOTS_ATTRIBUTE, None)
    return local if slots is None else slots.index_select(0, local.reshape(-1)).view(local.shape)


def _bring_home(
    group: Communicator, computed: torch.Tensor, send: Sequence[int], receive: Sequence[int], order: Ints
) -> torch.Tensor:
    """Send expert outputs back to the ranks whose tokens they belong to.

    Those of the pairs of this one come, of pair ``order[i]`` as number i. Returns them by pair, on the device
    of ``computed``.
    """
    on_host = _on_host(computed)
    parts = group.all_to_all_views(on_host, send, receive)
    width = computed.shape[1]
    if len(order) * width * computed.itemsize < _LARGE:
        sorted_rows = torch.cat(list(parts)).index_select(0, torch.from_numpy(_inverse(order)))
        return sorted_rows if on_host is computed else sorted_rows.to(computed.device)
    outputs = on_host.new_empty(len(order), width)
    rows, begin = _rows(outputs), 0
    for part in parts:  # each row from where its owner left it straight to its place
        rows[order[begin : begin + len(part)]] = _rows(part)
        begin += len(part)
    return outputs if on_host is computed else outputs.to(computed.device)


def _rows(tensor: torch.Tensor) -> npt.NDArray[np.void]:
    """Rows of a tensor as a numpy array of opaque items, which moves faster."""
    row_bytes = tensor.shape[1] * tensor.itemsize
    rows: npt.NDArray[np.void] = tensor.view(torch.uint8).numpy().view(f"V{row_bytes}")[:, 0]
    return rows


def _sum_at_home(outputs: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """outputs [tokens * k, H], weighted by [tokens, k] and summed over k.

    The sum is taken in order, in one type.
    """
    by_choice = outputs.view(*weights.shape, outputs.shape[-1]) * weights[:, :, None]
    total, *others = by_choice.unbind(1)
    for one in others:
        total = total + one
    return total.to(hidden.dtype)


def _pack(hidden: torch.Tensor, expert_ids: torch.Tensor, tags: torch.Tensor | None = None) -> torch.Tensor:
    """Hidden state, expert ids (int32) and perhaps tags (int64), in one type.

    Packed so, they take one collective instead of two.
    """
    parts = [hidden, expert_ids.to(torch.int32).contiguous().view(hidden.dtype)]
    if tags is not None:
        parts.append(tags[:, None].contiguous().view(hidden.dtype))
    return torch.cat(parts, dim=1)


def _unpack(packed: torch.Tensor, like: torch.Tensor, top_k: int) -> tuple[torch.Tensor, Ints, Ints | None]:
    """Hidden states, expert ids and perhaps tags out of the packed rows of a communicator.

    Hidden [n, H] is on the device of ``like`` (a view on the CPU), ids [n, k] and tags [n] on the host.
    """
    width = like.shape[1]
    hidden = packed[:, :width] if like.is_cpu else packed[:, :width].to(like.device)
    numbers = _to_host(packed[:, width:].contiguous().view(torch.int32))
    ids, tags = np.ascontiguousarray(numbers[:, :top_k]), np.ascontiguousarray(numbers[:, top_k:])
    return hidden, ids, tags.view(np.int64)[:, 0] if tags.shape[1] else None


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, where communicators take it; copied only if elsewhere."""
    return tensor if tensor.is_cpu else tensor.cpu()


def _to_host(numbers: torch.Tensor) -> Ints:
    host: Ints = numbers.cpu().numpy()
    return host


def _like(tensor: torch.Tensor, numbers: Ints) -> torch.Tensor:
    """Index tensor on the device of another tensor."""
    return torch.from_numpy(numbers).to(tensor.device)


def _inverse(order: Ints) -> Ints:
    """The inverse of a permutation."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse
