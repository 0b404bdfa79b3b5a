"""Ranks, attention heads and cores of each worker (pure: no torch, no sockets).

World rank order is (dp, pp, tp) with tp fastest, so the workers of one instance are neighbours and
the tensor-parallel group, which talks most, is the closest of all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

from parallel.control_groups import cpu_quota


class CannotCut(ValueError):
    """A model that cannot be cut in this way.

    The message says what is in the way and what to do.
    """


def workers_of_node(workers: int, node: int, nnodes: int) -> range:
    """The numbers of an instance's workers that run on one host.

    Workers are numbered by stage, then rank, so neighbours stay together. ``nnodes`` divides ``workers``.
    """
    each = workers // nnodes
    return range(node * each, (node + 1) * each)


def usable_cores() -> int:
    """Cores that this process may use: affinity, cpusets and control-group quotas.

    Threads beyond a quota would be stopped in the middle of steps.
    """
    quota = _quota()
    cores = len(os.sched_getaffinity(0))
    return cores if quota is None else max(1, min(cores, int(quota)))


@cache
def _quota() -> float | None:
    """The cores' worth of time, read once: instances ask between any two steps."""
    return cpu_quota()


def threads_per_worker(workers_on_host: int, cores: int) -> int:
    """Compute threads for each worker of a host, at least one.

    Threads beyond the cores are never given: OpenMP threads that spin on a shared core make a matrix
    product tens of times slower.
    """
    return max(1, cores // max(1, workers_on_host))


def cores_of_worker(cores: Sequence[int], worker: int, num_workers: int, threads: int) -> tuple[int, ...]:
    """Cores for one of an instance's workers alone.

    None (run anywhere) if they do not suffice.
    """
    if threads * num_workers > len(cores):
        return ()
    return tuple(cores[worker * threads : (worker + 1) * threads])


def sizes_that_divide(total: int) -> str:
    """Sizes that divide ``total``, as a sentence for messages."""
    return "Sizes that do: " + ", ".join(str(size) for size in range(1, total + 1) if total % size == 0)


def kv_heads_of(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[int, int]:
    """The KV heads that the query heads of this rank use.

    Raises:
        CannotCut: the query heads do not divide, or a rank's query heads would share KV heads unevenly.
    """
    fitting = [
        n
        for n in range(1, num_heads + 1)
        if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)
    ]
    if size not in fitting:
        raise CannotCut(
            f"{num_heads} attention heads and {num_kv_heads} KV heads cannot be divided by {size}. "
            f"Sizes that do: {', '.join(map(str, fitting))}"
        )
    if num_kv_heads % size == 0:
        each = num_kv_heads // size
        return rank * each, (rank + 1) * each
    head = rank * num_kv_heads // size
    return head, head + 1
