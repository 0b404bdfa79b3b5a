"""Which UCX of a host is used, over which devices, and what members agree on."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.links import infiniband, ucx_installation
from parallel.links.ucx_installation import PREFIX, find_ucx
from parallel.links.ucx_links import _agreed, net_devices


def install(prefix: Path, *, lib: str = "lib", headers: bool = True, rdma: bool = False) -> Path:
    """Files that look like a UCX; returns its library."""
    (prefix / lib / "ucx").mkdir(parents=True)
    if headers:
        (prefix / "include" / "ucp" / "api").mkdir(parents=True)
        (prefix / "include" / "ucp" / "api" / "ucp.h").touch()
    if rdma:
        (prefix / lib / "ucx" / "libuct_ib.so.0").touch()
    (prefix / lib / "libucp.so.0").touch()
    return prefix / lib / "libucp.so.0"


@pytest.fixture(autouse=True)
def _wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PREFIX, raising=False)
    place = tmp_path / "wheel"
    monkeypatch.setattr(ucx_installation, "_wheel", lambda: place if place.exists() else None)


def test_one_with_rdma_is_preferred_then_the_wheel(tmp_path: Path) -> None:
    system = [str(tmp_path / "vendor"), str(tmp_path / "usr")]
    with pytest.raises(OSError, match=r"UCX is not installed: pip install 'lockstep-mesh\[ucx\]'"):
        find_ucx(system)
    plain = install(tmp_path / "usr", lib="lib/x86_64-linux-gnu")
    assert find_ucx(system) == (plain, tmp_path / "usr" / "include", False)
    wheel = install(tmp_path / "wheel")
    assert find_ucx(system).library == wheel
    vendor = install(tmp_path / "vendor", lib="lib64", rdma=True)
    assert find_ucx(system) == (vendor, tmp_path / "vendor" / "include", True)
    assert "with InfiniBand" in str(find_ucx(system))


def test_libraries_without_headers_take_the_wheels(tmp_path: Path) -> None:
    install(tmp_path / "usr", headers=False, rdma=True)
    with pytest.raises(OSError, match="UCX has no headers here"):
        find_ucx([str(tmp_path / "usr")])
    install(tmp_path / "wheel")
    assert find_ucx([str(tmp_path / "usr")]).headers == tmp_path / "wheel" / "include"


def test_the_environment_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "wheel", rdma=True)
    mine = install(tmp_path / "mine")
    monkeypatch.setenv(PREFIX, str(tmp_path / "mine"))
    assert find_ucx().library == mine
    monkeypatch.setenv(PREFIX, str(tmp_path / "nothing"))
    with pytest.raises(OSError, match=f"{PREFIX}=.*nothing: there is no libucp.so.0"):
        find_ucx()


def test_devices_are_those_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert net_devices("127.0.0.1") == "lo"
    assert net_devices("198.51.100.1") is None
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    assert net_devices("127.0.0.1") is None


def test_ports_and_devices_in_the_kernels_files(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "class" / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    (tmp_path / "net" / "eth2" / "device" / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert infiniband.active_devices(tmp_path / "class") == ["mlx5_0:1"]
    assert infiniband.ports_that_are_down(tmp_path / "class") == ["mlx5_1:1 1: DOWN"]
    assert infiniband.device_of_interface("eth2", tmp_path / "net") == "mlx5_0"
    assert infiniband.device_of_interface("eth3", tmp_path / "net") is None


def test_members_agree() -> None:
    has, other, without = (b"1.22.0", b" ", b"\x00a b"), (b"1.20.1", b" ", b"c"), (b"", b"", b"")
    assert _agreed([has, has], "auto") == [b"\x00a b", b"\x00a b"]
    assert _agreed([has, without], "auto") is None
    assert _agreed([without, without], "auto") is None
    assert _agreed([has, other], "auto") is None
    with pytest.raises(ValueError, match=r"rank 0 has 1\.22\.0, rank 1 has 1\.20\.1"):
        _agreed([has, other], "ucx")
    with pytest.raises(ValueError, match="rank 1 cannot use UCX: no such device"):
        _agreed([has, (b"!", b" ", b"no such device")], "ucx")
