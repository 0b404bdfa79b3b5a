"""What the doctor says of UCX and of RDMA devices."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from router.tools.doctor.findings import Level
from router.tools.doctor.rdma import Rdma, check_rdma, read_rdma

PORT = "mlx5_0:1 InfiniBand 200 Gb/sec (4X HDR)"
WHOLE = Rdma(
    up=[PORT],
    device_files=["/dev/infiniband/uverbs0"],
    ucx="1.22.0, /usr/lib/libucp.so.0",
    has_rdma=True,
    seen=[("tcp", "eth0"), ("rc_mlx5", "mlx5_0:1"), ("sysv", "memory")],
)


def test_a_host_that_has_everything() -> None:
    ucx, rdma = check_rdma(WHOLE)
    assert (ucx.level, rdma.level) == (Level.OK, Level.OK)
    assert ucx.text == "1.22.0, /usr/lib/libucp.so.0: tcp on eth0, rc_mlx5 on mlx5_0:1, sysv"
    assert rdma.text == f"{PORT}: --mesh-transport auto takes UCX if all hosts have it"


def test_a_host_without_devices_lacks_nothing() -> None:
    for ucx in (None, "1.22.0"):
        assert {each.level for each in check_rdma(Rdma(ucx=ucx))} == {Level.OK}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"up": [], "down": ["mlx5_0:1 1: DOWN"]}, "no port is up: mlx5_0:1 1: DOWN"),
        ({"device_files": []}, "has no file /dev/infiniband/uverbs*"),
        ({"closed_files": ["/dev/infiniband/uverbs0"]}, "cannot open /dev/infiniband/uverbs0"),
        ({"locked": 8 << 20}, "may lock 8192 KiB"),
        ({"has_rdma": False}, "built without InfiniBand and RoCE"),
        ({"seen": [("tcp", "eth0")]}, "sees no RDMA device"),
        ({"problem": "it cannot be loaded"}, "it cannot be loaded"),
    ],
)
def test_what_is_missing_is_said(change: dict[str, object], text: str) -> None:
    found = [
        each for each in check_rdma(msgspec.structs.replace(WHOLE, **change)) if each.level is Level.WARNING
    ]
    assert len(found) == 1
    assert text in found[0].text
    assert found[0].fix


def test_ports_that_are_up_without_ucx() -> None:
    ucx, *_ = check_rdma(Rdma(up=[PORT], device_files=["/dev/infiniband/uverbs0"]))
    assert ucx.level is Level.NOTE
    assert "pip install" in ucx.fix


def test_this_host_is_read(tmp_path: Path) -> None:
    (tmp_path / "uverbs0").touch()
    rdma = read_rdma(tmp_path)
    assert rdma.device_files == [str(tmp_path / "uverbs0")]
    assert rdma.ucx is None or rdma.problem or ("tcp", "lo") in rdma.seen
