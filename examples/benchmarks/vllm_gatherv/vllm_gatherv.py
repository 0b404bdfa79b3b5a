"""Collectives that let vLLM's CPU build serve mixtures of experts with ``-dp 2``.

As released it dies of its first request, since its communicator for CPUs has no collectives for parts of
different lengths.

Both are made of gloo's: rows padded to the longest part and gathered, and a sum of which each rank keeps
its part. Without ``--enable-expert-parallel``: with it, vLLM's kernel for experts fails on CPUs even so.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    import torch
    from torch import distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gather(comm: Any, part: Any, sizes: list[int]) -> Any:
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: len(part)] = part
        found = part.new_empty(len(sizes) * len(padded), *part.shape[1:])
        dist.all_gather_into_tensor(found, padded, group=comm.device_group)
        parts = found.view(len(sizes), *padded.shape)
        return torch.cat([parts[rank, :size] for rank, size in enumerate(sizes)])

    def all_gatherv(comm: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        assert dim == 0
        parts = input_ if isinstance(input_, list) else [input_]
        lengths = sizes or [len(parts[0])] * comm.world_size
        found = [gather(comm, part, lengths) for part in parts]
        return found if isinstance(input_, list) else found[0]

    def reduce_scatterv(comm: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
        assert dim == 0
        lengths = sizes or [len(input_) // comm.world_size] * comm.world_size
        total = input_.clone()
        dist.all_reduce(total, group=comm.device_group)
        begin = sum(lengths[: comm.rank_in_group])
        return total[begin : begin + lengths[comm.rank_in_group]].clone()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
