"""Membership in a trainer's process group, by torch's gloo or NCCL (loads torch).

The names in the store are those of a group that a trainer makes with ``torch.distributed`` itself. No object
is pickled: the store has addresses, and the group has numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.trainer_group.wire import Announced, JoinGroup, buffers_of, header_of

TRAINER = 0
"""Rank of the process that sends."""


class TrainerGroup:
    """This mesh's ranks in a trainer's group.

    A trainer may count a rank for each worker of the mesh. All are here: what the first one receives is kept,
    the rest is dropped.
    """

    def __init__(self, join: JoinGroup) -> None:
        """Wait for the trainer, and for all ranks.

        Raises:
            RuntimeError: the trainer, or another rank, has not come in time.
        """
        timeout = timedelta(seconds=join.timeout)
        self._device = torch.device("cuda" if join.backend == "nccl" else "cpu")
        ranks = range(join.first_rank, join.world_size)
        make: Callable[..., Any] = _nccl if join.backend == "nccl" else _gloo

        def member(rank: int) -> Any:
            store = dist.TCPStore(join.address, join.port, join.world_size, False, timeout)
            for prefix in (join.group, f"{join.group}/", f"{self._device.type}/"):
                store = dist.PrefixStore(prefix, store)
            return make(store, rank, join.world_size, timeout)

        self._threads = ThreadPoolExecutor(len(ranks), "trainer-rank")
        self._members = list(self._threads.map(member, ranks))
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<TrainerGroup of {len(self._members)} ranks on {self._device}>"

    def receive(self, tensors: Sequence[Announced], path: Path, packed_bytes: int) -> None:
        """Receive tensors, and write them to a file.

        Raises:
            RuntimeError: the trainer is gone, or sends something else.
        """
        with path.open("wb") as file:
            file.write(header_of(tensors))
            for together in buffers_of(tensors, packed_bytes):
                file.write(memoryview(self._next(together, is_packed=packed_bytes > 0).numpy()))

    def _next(self, together: Sequence[Announced], *, is_packed: bool) -> torch.Tensor:
        """The bytes of the next buffer."""
        if is_packed:
            size, dtype = sum(each.num_bytes for each in together), torch.uint8
        else:
            (one,) = together
            dtype = getattr(torch, one.dtype)
            size = one.num_bytes // dtype.itemsize
        if not size:
            return torch.empty(0, dtype=torch.uint8)

        def receive(member: Any) -> torch.Tensor:
            buffer = torch.empty(size, dtype=dtype, device=self._device)
            options = dist.BroadcastOptions()
            options.rootRank = TRAINER
            options.rootTensor = 0
            options.timeout = self._timeout
            member.broadcast([buffer], options).wait(self._timeout)
            return buffer

        kept, *_ = self._threads.map(receive, self._members)
        return kept.view(torch.uint8).cpu()


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A member on the first device; untested, as no machine of the tests has one."""
    torch.cuda.set_device(0)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
