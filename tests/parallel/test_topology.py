from __future__ import annotations

from pathlib import Path

import pytest

from parallel.topology import (
    threads_per_worker,
    usable_cores,
    visible_cuda_devices,
    workers_of_node,
)


@pytest.mark.parametrize(
    ("workers", "cores", "threads"), [(1, 2, 2), (2, 2, 1), (3, 2, 1), (2, 9, 4), (0, 4, 4)]
)
def test_cores_are_shared_and_never_exceeded(workers: int, cores: int, threads: int) -> None:
    assert threads_per_worker(workers, cores) == threads


def test_some_core_is_usable() -> None:
    assert usable_cores() >= 1


def test_cuda_devices_are_those_that_were_left_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, count in (("", 0), ("0", 1), ("2,3", 2), ("-1", 0), ("GPU-a,GPU-b", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert visible_cuda_devices() == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_cuda_devices() == len(list(Path("/dev").glob("nvidia[0-9]*")))


@pytest.mark.parametrize(("workers", "nnodes"), [(4, 1), (4, 2), (6, 3), (2, 2)])
def test_each_worker_is_on_one_node_and_neighbours_stay_together(workers: int, nnodes: int) -> None:
    dealt = [worker for node in range(nnodes) for worker in workers_of_node(workers, node, nnodes)]
    assert dealt == list(range(workers))
    assert len({len(workers_of_node(workers, node, nnodes)) for node in range(nnodes)}) == 1
