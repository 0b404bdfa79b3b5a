from __future__ import annotations

import pytest

from parallel.topology import threads_per_worker, usable_cores, workers_of_node


@pytest.mark.parametrize(
    ("workers", "cores", "threads"), [(1, 2, 2), (2, 2, 1), (3, 2, 1), (2, 9, 4), (0, 4, 4)]
)
def test_cores_are_shared_and_never_exceeded(workers: int, cores: int, threads: int) -> None:
    assert threads_per_worker(workers, cores) == threads


def test_some_core_is_usable() -> None:
    assert usable_cores() >= 1


@pytest.mark.parametrize(("workers", "nnodes"), [(4, 1), (4, 2), (6, 3), (2, 2)])
def test_each_worker_is_on_one_node_and_neighbours_stay_together(workers: int, nnodes: int) -> None:
    dealt = [worker for node in range(nnodes) for worker in workers_of_node(workers, node, nnodes)]
    assert dealt == list(range(workers))
    assert len({len(workers_of_node(workers, node, nnodes)) for node in range(nnodes)}) == 1
