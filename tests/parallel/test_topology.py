from __future__ import annotations

from pathlib import Path

import pytest

from parallel.topology import (
    cuda_devices,
    devices_of_instance,
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


def test_names_of_devices_are_those_that_cuda_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, names in (
        ("2, 3", ("2", "3")),
        ("GPU-8f2c,GPU-01", ("GPU-8f2c", "GPU-01")),
        ("MIG-1/2/0", ("MIG-1/2/0",)),
        ("1,-1,0", ("1",)),  # as for CUDA, the list ends there
        ("", ()),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert cuda_devices() == names


DEVICES = ("4", "5", "GPU-a", "7")


@pytest.mark.parametrize(
    ("workers", "numbers", "seen"),
    [
        (1, range(5), [("4",), ("5",), ("GPU-a",), ("7",), ("4",)]),
        (2, range(3), [("4", "5"), ("GPU-a", "7"), ("4", "5")]),
        (3, range(2), [("4", "5", "GPU-a"), ("7", "4", "5")]),
        (4, range(2), [(), ()]),  # it needs all
        (5, range(1), [()]),  # and more: the worker that finds none says so
    ],
)
def test_each_instance_has_devices_of_its_own(
    workers: int, numbers: range, seen: list[tuple[str, ...]]
) -> None:
    assert [devices_of_instance(DEVICES, number, workers, 1) for number in numbers] == seen
    assert devices_of_instance((), 3, workers, 1) == ()


def test_an_instance_that_learns_its_size_from_the_mesh_sees_all_devices_its_own_first() -> None:
    others_first = ("GPU-a", "7", "4", "5")
    assert [devices_of_instance(DEVICES, number, None, 2) for number in range(3)] == [(), others_first, ()]
    crowd = [devices_of_instance(DEVICES, number, None, 9) for number in range(5)]
    assert [seen[:1] for seen in crowd] == [(), ("5",), ("GPU-a",), ("7",), ()]
    assert devices_of_instance(("3",), 1, None, 2) == devices_of_instance((), 1, None, 1) == ()


@pytest.mark.parametrize(("workers", "nnodes"), [(4, 1), (4, 2), (6, 3), (2, 2)])
def test_each_worker_is_on_one_node_and_neighbours_stay_together(workers: int, nnodes: int) -> None:
    dealt = [worker for node in range(nnodes) for worker in workers_of_node(workers, node, nnodes)]
    assert dealt == list(range(workers))
    assert len({len(workers_of_node(workers, node, nnodes)) for node in range(nnodes)}) == 1
