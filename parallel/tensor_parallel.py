"""Tensor-parallel layers: linear, norm, embedding and experts cut over ranks.

The way of cutting is that of Megatron-LM (Shoeybi et al. 2019).

Some outputs of a linear layer are a plain linear layer; one that has the matching inputs gives partial sums,
which the ranks add up. :mod:`parallel.tensor_plan` decides which layer of a model becomes which of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from parallel.communicators.base import Communicator, carries
from parallel.rounds.arithmetic import even_sizes
from parallel.topology import CannotCut, sizes_that_divide


@dataclass
class TensorRank:
    """A tensor-parallel rank: its number, group size, and collectives for its layers."""

    rank: int
    size: int
    group: Communicator | None = None
    """The group; None while only shapes are looked at."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors."""
        if self.group is None or not partial.numel():
            return partial
        if carries(self.group, partial):
            return self.group.all_reduce(partial)
        return self.group.all_reduce(partial.cpu()).to(partial.device)

    def all_gather_columns(self, part: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """[..., widths[rank]] of all ranks, side by side: [..., sum(widths)]."""
        rows = part.shape[:-1].numel()
        if self.group is None or not rows:
            return part.new_zeros(*part.shape[:-1], sum(widths))
        flat = part.reshape(-1)
        flat = flat if carries(self.group, flat) else flat.cpu()
        gathered = self.group.all_gather_view(flat, [rows * width for width in widths])
        pieces = gathered.split([rows * width for width in widths])
        columns = [piece.view(rows, width) for piece, width in zip(pieces, widths, strict=True)]
        return torch.cat(columns, dim=1).view(*part.shape[:-1], -1).to(part.device)

    def all_gather_rows(self, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Rows [sizes[rank], ...] of all ranks, one below the other: [sum(sizes), ...].

        The result is memory of the caller's own: layers of models write into what they are given.
        """
        if self.group is None or not sum(sizes):
            return part.new_zeros(sum(sizes), *part.shape[1:])
        if carries(self.group, part):
            return self.group.all_gather(part, sizes)
        return self.group.all_gather(part.cpu(), sizes).to(part.device)

    def even(self, total: int) -> tuple[int, int]:
        """This rank's range of ``total`` things, as equal as can be."""
        sizes = even_sizes(total, self.size)
        start = sum(sizes[: self.rank])
        return start, start + sizes[self.rank]

    def share(self, total: int, what: str) -> tuple[int, int]:
        """This rank's range of ``total`` things that must divide evenly."""
        if total % self.size:
            raise CannotCut(f"{what}: {total} cannot be divided by {self.size}. {sizes_that_divide(total)}")
        return total // self.size * self.rank, total // self.size * (self.rank + 1)


# ---- layers


class RowParallelLinear(torch.nn.Module):  # type: ignore[misc]
    """Linear layer with some of its inputs.

    Partial sums are added up over the ranks, then the bias is added.
    """

    def __init__(self, whole: Any, ranks: TensorRank, start: int, stop: int, *, split_input: bool) -> None:
        super().__init__()
        self.is_turned = is_turned(whole)
        """Whether the weight is [inputs, outputs]."""
        outputs, inputs = outputs_of(whole), stop - start
        shape = (inputs, outputs) if self.is_turned else (outputs, inputs)
        self.weight = empty_parameter(whole.weight, shape)
        self.bias = whole.bias
        self.in_features, self.out_features = inputs, outputs
        self._ranks = ranks
        self._input = slice(start, stop) if split_input else None

    @property
    def splits_input(self) -> bool:
        """Whether the layer is given all inputs, and takes its own part."""
        return self._input is not None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., inputs of this rank, or all if it selects its own] -> [..., outputs]."""
        weight = self.weight.mT if self.is_turned else self.weight
        total = self.sum_over_ranks(F.linear(self.own_inputs(inputs), weight))
        return total if self.bias is None else total + self.bias

    @property
    def num_ranks(self) -> int:
        """Number of ranks whose partial sums are added."""
        return self._ranks.size

    def own_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """The part of the inputs that this rank multiplies."""
        return inputs if self._input is None else inputs[..., self._input]

    def sum_over_ranks(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of a partial result over all ranks."""
        return self._ranks.all_reduce(partial)


class GatheredLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer that has some of its outputs and gathers the others."""

    def __init__(self, whole: torch.nn.Linear, ranks: TensorRank) -> None:
        super().__init__()
        start, stop = ranks.even(whole.out_features)
        self.weight = empty_parameter(whole.weight, (stop - start, whole.in_features))
        self.bias = None if whole.bias is None else empty_parameter(whole.bias, (stop - start,))
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self._ranks = ranks
        self._widths = even_sizes(whole.out_features, ranks.size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., all outputs]."""
        return self._ranks.all_gather_columns(F.linear(inputs, self.weight, self.bias), self._widths)


class ParallelRMSNorm(torch.nn.Module):  # type: ignore[misc]
    """Root-mean-square norm over a width of which this rank has a part.

    The squares are added up over the ranks.
    """

    def __init__(self, whole: Any, ranks: TensorRank, size: int, copies: int) -> None:
        """``copies``: on how many ranks each element stands."""
        super().__init__()
        self.weight = empty_parameter(whole.weight, (size,))
        self.variance_epsilon = float(whole.variance_epsilon)
        self._width = whole.weight.shape[0] * copies
        self._copies = copies
        self._ranks = ranks

    @property
    def whole_width(self) -> int:
        """Numbers that the norm is over, each counted once."""
        return int(self._width) // self._copies

    @property
    def is_first(self) -> bool:
        """Whether no rank before this one has the same numbers."""
        return self._ranks.rank % self._copies == 0

    def be_alone(self) -> None:
        """Turn this norm into one over this rank's part alone."""
        self._ranks, self._width, self._copies = TensorRank(0, 1), int(self.weight.numel()), 1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., part of the width] -> the same."""
        wide = hidden.float()
        squares = self._ranks.all_reduce(wide.pow(2).sum(-1, keepdim=True))
        wide = wide * torch.rsqrt(squares / self._width + self.variance_epsilon)
        normed: torch.Tensor = self.weight * wide.to(hidden.dtype)
        return normed


class VocabularyParallel:
    """Mixin for an embedding with some of the rows.

    A token's vector comes from the rank that has its row.
    """

    _ranks: TensorRank
    first: int
    """Number of the first token whose vector is here."""
    num_embeddings: int

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        local = input_ids - self.first
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        found: torch.Tensor = super().forward(local.masked_fill(elsewhere, 0))  # type: ignore[misc]
        return self._ranks.all_reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class SummedExperts:
    """Mixin for a module of experts that gives partial sums."""

    _ranks: TensorRank
    first_whole: int | None = None
    """Number of the first expert here; None where each rank has a part of all."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._ranks.all_reduce(super().forward(*args, **kwargs))  # type: ignore[misc]


class FirstRankOnly(torch.nn.Module):  # type: ignore[misc]
    """Identity whose output only the first rank adds.

    It stands among modules whose outputs are summed over ranks.
    """

    def __init__(self, ranks: TensorRank) -> None:
        super().__init__()
        self._is_first = ranks.rank == 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same, or zeros."""
        return hidden if self._is_first else torch.zeros_like(hidden)


class OwnNumbers:
    """View of a model config that overrides some values for one rank's module."""

    def __init__(self, config: Any, **own: int) -> None:
        self.__dict__.update(own, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_config"], name)


def is_turned(linear: Any) -> bool:
    """Whether a linear layer keeps its weight as [inputs, outputs]: transformers' ``Conv1D``."""
    return hasattr(linear, "nf")


def outputs_of(linear: Any) -> int:
    """Number of a linear layer's outputs."""
    return int(linear.weight.shape[1 if is_turned(linear) else 0])


def inputs_of(linear: Any) -> int:
    """Number of a linear layer's inputs."""
    return int(linear.weight.shape[0 if is_turned(linear) else 1])


def mix_in(mixin: type, module: Any, ranks: TensorRank) -> None:
    """Put ``mixin`` before a module's class; the module keeps all it does otherwise."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
    module._ranks = ranks


def empty_parameter(like: torch.Tensor, shape: tuple[int, ...]) -> torch.nn.Parameter:
    """An empty parameter of another shape, to be filled later."""
    return torch.nn.Parameter(like.new_empty(shape), requires_grad=False)
