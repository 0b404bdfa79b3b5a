"""Which accelerators a host has, and which instance gets which."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel import devices
from parallel.devices import (
    SHARERS_VARIABLE,
    cuda_devices,
    device_sharers,
    devices_of_instance,
    has_device,
    sharers_of_device,
    visible_cuda_devices,
    visible_variable,
)

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A maker of pretended hosts: files below the root, and variables."""

    def make(files: Sequence[str] = (), kfd: Sequence[int] = (), **environment: str) -> Path:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        (root / "dev").mkdir(parents=True)
        for name in [*files, *(["dev/kfd"] if kfd else [])]:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        for number, simds in enumerate(kfd):
            node = root / "sys/class/kfd/kfd/topology/nodes" / str(number)
            node.mkdir(parents=True)
            (node / "properties").write_text(f"cpu_cores_count 8\nsimd_count {simds}\n")
        for variable in VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(devices, "ROOT", root)
        monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not loaded
        return root

    return make


NVIDIA = ["dev/nvidia0", "dev/nvidia1", "dev/nvidia2", "dev/nvidia3", "dev/nvidiactl", "dev/nvidia-uvm"]
WSL = ["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"]


@pytest.mark.parametrize(
    ("files", "kfd", "environment", "names"),
    [
        ((), (), {}, ()),
        ((), (), {"CUDA_VISIBLE_DEVICES": "0,1"}, ()),  # a variable makes no device
        (["dev/nvidiactl"], (), {"CUDA_VISIBLE_DEVICES": "0"}, ()),
        (NVIDIA, (), {}, ("0", "1", "2", "3")),
        (NVIDIA, (), {"CUDA_VISIBLE_DEVICES": ""}, ()),
        (NVIDIA, (), {"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        (NVIDIA, (), {"CUDA_VISIBLE_DEVICES": "2, 3"}, ("2", "3")),
        (NVIDIA, (), {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ("1",)),  # as for CUDA, the list ends there
        (NVIDIA, (), {"CUDA_VISIBLE_DEVICES": "1,4,0"}, ("1",)),  # there is no fifth one
        (NVIDIA, (), {"CUDA_VISIBLE_DEVICES": "GPU-8f2c,GPU-01"}, ("GPU-8f2c", "GPU-01")),
        (NVIDIA, (), {"CUDA_VISIBLE_DEVICES": "MIG-1/2/0"}, ("MIG-1/2/0",)),
        (NVIDIA, (), {"HIP_VISIBLE_DEVICES": "1"}, ("0", "1", "2", "3")),
        (WSL, (), {}, ("0",)),
        (["dev/dxg"], (), {}, ()),  # without CUDA's library it is for pictures
        (["dev/nvhost-gpu"], (), {}, ("0",)),
        ((), (0, 304, 304, 0), {}, ("0", "1")),  # CPUs are nodes, too
        ((), (0, 304, 304), {"HIP_VISIBLE_DEVICES": "1"}, ("1",)),
        ((), (0, 304, 304), {"CUDA_VISIBLE_DEVICES": "1"}, ("1",)),
        ((), (0, 304, 304), {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ("0",)),
        ((), (0, 304, 304, 304), {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1,2"}, ("1",)),
    ],
)
def test_devices_are_what_the_kernel_shows_and_variables_leave(
    host, files: Sequence[str], kfd: Sequence[int], environment: Mapping[str, str], names: tuple[str, ...]
) -> None:
    host(files, kfd, **environment)
    assert cuda_devices() == names
    assert visible_cuda_devices() == len(names)
    assert has_device() == bool(
        [each for each in files if each[-1].isdecimal() or "host" in each] or sum(kfd)
    )
    assert visible_variable() == ("HIP_VISIBLE_DEVICES" if kfd else "CUDA_VISIBLE_DEVICES")


def test_the_driver_knows_best_where_torch_is_loaded(host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CPUs sees none; a driver may see devices without files."""
    seen = 0
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: seen))
    host(NVIDIA, CUDA_VISIBLE_DEVICES="2,3")
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert cuda_devices() == ()
    seen = 1
    assert cuda_devices() == ("2",)
    host()
    monkeypatch.setitem(sys.modules, "torch", torch)
    seen = 2
    assert cuda_devices() == ("0", "1")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # it is being loaded
    assert cuda_devices() == ()


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


@pytest.mark.parametrize(
    ("total", "workers", "neighbours", "sharers"),
    [
        (0, 1, 4, 1),
        (1, 1, 2, 2),
        (2, 1, 2, 1),
        (2, 1, 3, 2),
        (4, 2, 3, 2),
        (8, 2, 4, 1),
        (4, None, 2, 1),
        (1, 4, 1, 4),
    ],
)
def test_instances_on_one_device_are_counted(total, workers, neighbours, sharers) -> None:
    assert sharers_of_device(total, workers, neighbours) == sharers


def test_an_instance_knows_from_its_launcher_who_shares_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, found in (("3", 3), ("0", 1), ("", 1), ("many", 1)):
        monkeypatch.setenv(SHARERS_VARIABLE, given)
        assert device_sharers() == found
    monkeypatch.delenv(SHARERS_VARIABLE)
    assert device_sharers() == 1
