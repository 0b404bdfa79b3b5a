"""Experts spread over the ranks of a group: dispatch, local experts, combine.

A model's expert layer asks for some (token, expert) pairs. Each pair's hidden state goes to the rank that
holds the expert, is computed there in one grouped product with everybody else's, and the result comes
home, where a token's expert outputs are weighted and summed in top-k order. So the sum does not depend
on how many ranks there are or where an expert lives.

Two ways of dispatch, both with the row counts of all ranks known from the step's headers:

- ``allgather_reducescatter``: everybody gets all tokens and their routing, computes the pairs of its own
  experts, and sends each result home. Every pair is computed once, so the reduction over ranks has one
  term per row, and both sides know the sizes: two collectives per layer.
- ``all_to_all``: only the pairs of a rank's experts are sent to it. Less data with many ranks, but the
  counts have to be told first: three collectives per layer.

The way in is transformers' experts interface: :func:`expert_forward` is registered under one name and
finds its :class:`ExpertParallel` on the module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from parallel.communicators.base import Communicator
from parallel.placement import Placement

Dispatch = Literal["allgather_reducescatter", "all_to_all"]

ATTRIBUTE = "lockstep_experts"
"""Attribute of an experts module that holds its :class:`ExpertParallel`."""

LocalExperts = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(experts module, hidden [n, H], expert numbers [n, 1], weights [n, 1]) -> [n, H]"""


class Times:
    """Seconds of the last step, over all layers, and pairs per expert since the start."""

    def __init__(self) -> None:
        self.dispatch = self.experts = self.combine = 0.0

    def reset(self) -> None:
        self.dispatch = self.experts = self.combine = 0.0


class ExpertParallel:
    """The experts of all layers, as seen by one rank.

    Until :meth:`join` gives it a group, pairs of experts that are elsewhere count as zero: that is enough
    to find out the shapes of a model while it is loaded.
    """

    def __init__(
        self, placement: Placement, rank: int, dispatch: Dispatch, local_experts: LocalExperts
    ) -> None:
        self.placement = placement
        self.rank = rank
        self.times = Times()
        self._dispatch = dispatch
        self._local_experts = local_experts
        self._owners = torch.tensor(placement.owners)
        self._local_numbers = torch.tensor(placement.local_numbers())
        self._group: Communicator | None = None
        self._sizes: Sequence[int] = ()
        self.tokens_per_expert = torch.zeros(len(placement.owners), dtype=torch.int64)
        """Pairs computed here by expert, over all layers and steps."""

    def __repr__(self) -> str:
        return f"<ExpertParallel rank {self.rank} of {self.placement.num_ranks}, {self._dispatch}>"

    def join(self, group: Communicator) -> None:
        """Use this group from the next step on; the one before is left to its owner."""
        self._group = group

    def begin(self, sizes: Sequence[int]) -> None:
        """A step begins in which rank r has ``sizes[r]`` tokens in every layer."""
        self._sizes = sizes
        self.times.reset()

    def forward(
        self, module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """One layer: hidden [tokens, H], expert_ids and weights [tokens, k] -> [tokens, H].

        With zero tokens it only takes part in what the others need.
        """
        if self._owners.device != hidden.device:
            self._move(hidden.device)
        if self._group is None or self._group.size == 1:
            outputs = self._compute_alone(module, hidden, expert_ids)
        elif self._dispatch == "all_to_all":
            outputs = self._all_to_all(module, self._group, hidden, expert_ids)
        else:
            outputs = self._all_gather(module, self._group, hidden, expert_ids)
        return _sum_at_home(outputs, weights, hidden)

    # ---- ways of dispatch; each returns the unweighted outputs of this rank's pairs [tokens * k, H]

    def _compute_alone(self, module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        flat = expert_ids.reshape(-1)
        mine = (self._owners[flat] == self.rank).nonzero()[:, 0]
        rows = hidden[mine // expert_ids.shape[1]]
        outputs = hidden.new_zeros(len(flat), hidden.shape[1])
        outputs[mine] = self._compute(module, rows, flat[mine])
        return outputs

    def _all_gather(
        self, module: Any, group: Communicator, hidden: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        began = time.perf_counter()
        top_k = expert_ids.shape[1]
        packed = _pack(hidden, expert_ids)
        all_hidden, all_ids = _unpack(group.all_gather(packed, self._sizes), hidden, top_k)
        flat = all_ids.reshape(-1)
        mine = (self._owners[flat] == self.rank).nonzero()[:, 0]
        gathered = time.perf_counter()
        computed = self._compute(module, all_hidden[mine // top_k], flat[mine])
        done = time.perf_counter()
        # Results in pair order are in the order of home ranks; how many go to each and come from each
        # follows from the routing, which is here.
        ends = torch.tensor(self._sizes, device=hidden.device).cumsum(0) * top_k
        homes = torch.searchsorted(ends, mine, right=True)
        own = expert_ids.reshape(-1)
        owners = self._owners[own]
        send = torch.bincount(homes, minlength=group.size).tolist()
        receive = torch.bincount(owners, minlength=group.size).tolist()
        returned = group.all_to_all(computed, send, receive)
        outputs = torch.empty_like(returned)
        outputs[owners.argsort(stable=True)] = returned
        self._note(began, gathered, done)
        return outputs

    def _all_to_all(
        self, module: Any, group: Communicator, hidden: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        began = time.perf_counter()
        flat = expert_ids.reshape(-1)
        owners = self._owners[flat]
        order = owners.argsort(stable=True)
        send = torch.bincount(owners, minlength=group.size).tolist()
        counts = group.all_gather_ints(send)
        receive = [row[self.rank] for row in counts]
        packed = _pack(hidden[order // expert_ids.shape[1]], flat[order][:, None])
        rows, ids = _unpack(group.all_to_all(packed, send, receive), hidden, 1)
        gathered = time.perf_counter()
        computed = self._compute(module, rows, ids[:, 0])
        done = time.perf_counter()
        returned = group.all_to_all(computed, receive, send)
        outputs = torch.empty_like(returned)
        outputs[order] = returned
        self._note(began, gathered, done)
        return outputs

    # ---- helpers

    def _compute(self, module: Any, rows: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Outputs [n, H] of rows [n, H] at experts that are all held here."""
        self.tokens_per_expert += torch.bincount(expert_ids, minlength=len(self.placement.owners)).cpu()
        if not len(rows):
            return rows.new_empty(rows.shape)
        local = self._local_numbers[expert_ids][:, None]
        return self._local_experts(module, rows, local, rows.new_ones(len(rows), 1))

    def _move(self, device: torch.device) -> None:
        self._owners, self._local_numbers = self._owners.to(device), self._local_numbers.to(device)

    def _note(self, began: float, gathered: float, done: float) -> None:
        self.times.dispatch += gathered - began
        self.times.experts += done - gathered
        self.times.combine += time.perf_counter() - done


def expert_forward(
    module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What transformers' expert layers call: the module knows its place in the group."""
    parallel: ExpertParallel = getattr(module, ATTRIBUTE)
    return parallel.forward(module, hidden, expert_ids, weights)


def _sum_at_home(outputs: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """outputs [tokens * k, H] weighted by [tokens, k] and summed over k, in order, in one type."""
    by_choice = outputs.view(*weights.shape, outputs.shape[-1]) * weights[:, :, None]
    total = by_choice[:, 0]
    for choice in range(1, weights.shape[1]):
        total = total + by_choice[:, choice]
    return total.to(hidden.dtype)


def _pack(hidden: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Rows of bytes, hidden state then expert ids (int32): one collective instead of two."""
    ids = expert_ids.to(torch.int32).contiguous()
    parts = (hidden.contiguous().view(torch.uint8), ids.view(torch.uint8))
    return torch.cat([part.reshape(len(hidden), -1) for part in parts] if len(hidden) else [
        part.new_empty(0, tensor.shape[1] * tensor.element_size())
        for part, tensor in zip(parts, (hidden, ids), strict=True)
    ], dim=1)  # fmt: skip


def _unpack(packed: torch.Tensor, like: torch.Tensor, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of :func:`_pack`: hidden [n, H] of the type of ``like``, ids [n, num_ids] int64."""
    width = like.shape[1] * like.element_size()
    hidden = packed[:, :width].contiguous().view(like.dtype).reshape(-1, like.shape[1])
    ids = packed[:, width:].contiguous().view(torch.int32).reshape(-1, num_ids)
    return hidden, ids.long()
