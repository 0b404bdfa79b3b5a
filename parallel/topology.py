"""Which worker stands where, and how many cores it gets (pure: no torch, no sockets).

World rank order is (dp, pp, tp) with tp fastest, so the workers of one instance are neighbours and
the tensor-parallel group, which talks most, is the closest of all.
"""

from __future__ import annotations

import os

import msgspec


class Layout(msgspec.Struct, frozen=True):
    """Sizes of the parallel axes of one mesh.

    dp: number of instances; pp: pipeline stages per instance; tp: tensor shards per stage.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in (("dp", self.dp), ("pp", self.pp), ("tp", self.tp)):
            if size < 1:
                raise ValueError(f"the size of axis {axis} must be at least 1, not {size}")

    @property
    def workers_per_instance(self) -> int:
        return self.pp * self.tp

    @property
    def world_size(self) -> int:
        return self.dp * self.workers_per_instance

    def world_rank(self, dp: int, pp: int = 0, tp: int = 0) -> int:
        """The number of the worker at these coordinates in the whole world."""
        return (dp * self.pp + pp) * self.tp + tp

    def coordinates(self, world_rank: int) -> tuple[int, int, int]:
        """(dp, pp, tp) of a worker; the inverse of :meth:`world_rank`."""
        rest, tp = divmod(world_rank, self.tp)
        dp, pp = divmod(rest, self.pp)
        return dp, pp, tp


def usable_cores() -> int:
    """Cores that this process may run on (affinity and cpusets included)."""
    return len(os.sched_getaffinity(0))


def threads_per_worker(workers_on_host: int, cores: int) -> int:
    """Compute threads for each worker of a host, at least one.

    Threads beyond the cores are never given: OpenMP threads that spin on a shared core make a matrix
    product tens of times slower.
    """
    return max(1, cores // max(1, workers_on_host))
