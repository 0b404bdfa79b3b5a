"""Arithmetic that all backends share: sums in rank order, sizes, checks of arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

TWO_STEP_BYTES = 64 << 10
"""Tensors of more bytes are reduced in parts, if there are more than two members."""

_HALF_TYPES = (torch.bfloat16, torch.float16)


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """``out`` = parts[0] + parts[1] + ..., element by element.

    The order is fixed, so the bits are the same wherever the sum is computed.

    Half types are summed in float32 and rounded once.
    """
    if len(parts) == 1:
        return out.copy_(parts[0])
    if len(parts) == 2 or out.dtype not in _HALF_TYPES:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return out
    total = parts[0].float()
    for part in parts[1:]:
        total.add_(part)
    return out.copy_(total)


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which elements of a type are added up."""
    return torch.float32 if dtype in _HALF_TYPES else dtype


def add_in_rank_order(total: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add further terms, in place, to a sum of the type :func:`sum_type`.

    Begun with the first term and rounded once at the end, it has the bits of :func:`sum_in_rank_order`.
    """
    for term in terms:
        total.add_(term)
    return total


def even_sizes(total: int, size: int) -> list[int]:
    """``total`` elements cut for ``size`` members, as equal as can be."""
    return [total // size + (rank < total % size) for rank in range(size)]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the transports want it: on the CPU, in one piece, outside autograd."""
    if not tensor.is_cpu:
        raise ValueError(f"this communicator carries CPU tensors only, not {tensor.device}")
    if tensor.requires_grad or not tensor.is_contiguous():  # asking is faster than doing nothing
        return tensor.detach().contiguous()
    return tensor


def check_sizes(what: str, sizes: Sequence[int], size: int) -> int:
    """One number of rows for each member; returns their sum."""
    if len(sizes) != size or min(sizes) < 0:
        raise ValueError(f"{what}: a group of {size} needs that many sizes, none negative, not {list(sizes)}")
    return sum(sizes)


def check_rows(what: str, tensor: torch.Tensor, rows: int) -> None:
    """Check that the first dimension equals the sum of the sizes."""
    shape = tensor.shape
    if not shape or shape[0] != rows:
        raise ValueError(f"{what}: the sizes say {rows} rows, the tensor is {list(shape)}")


def check_own(what: str, sent: int, received: int) -> None:
    """Check that a member sends to itself as much as it receives from itself."""
    if sent != received:
        raise ValueError(f"{what}: {sent} rows for this member itself, {received} from it")


def check_peer(rank: int, peer: int, size: int) -> None:
    """Check that a member sends to another one, or receives from it."""
    if peer == rank or not 0 <= peer < size:
        raise ValueError(f"rank {rank} of {size} has no link to rank {peer}")
