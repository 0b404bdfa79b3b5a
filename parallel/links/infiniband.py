"""InfiniBand and RoCE ports of this host, from the kernel's files (loads no torch)."""

from __future__ import annotations

from pathlib import Path

CLASS_DIRECTORY = Path("/sys/class/infiniband")
NET_DIRECTORY = Path("/sys/class/net")


def active_ports(directory: Path = CLASS_DIRECTORY) -> list[str]:
    """Ports that are up, such as ``mlx5_0:1 InfiniBand 200 Gb/sec (4X HDR)``."""
    return [
        f"{port.parent.parent.name}:{port.name} {_read(port / 'link_layer')} {_read(port / 'rate')}"
        for port in _ports(directory)
        if "ACTIVE" in _read(port / "state")
    ]


def active_devices(directory: Path = CLASS_DIRECTORY) -> list[str]:
    """Names of the ports that are up, such as ``mlx5_0:1``."""
    return [each.partition(" ")[0] for each in active_ports(directory)]


def ports_that_are_down(directory: Path = CLASS_DIRECTORY) -> list[str]:
    """Ports that are not up, with their state, such as ``mlx5_0:1 1: DOWN``."""
    return [
        f"{port.parent.parent.name}:{port.name} {state}"
        for port in _ports(directory)
        if "ACTIVE" not in (state := _read(port / "state"))
    ]


def device_of_interface(interface: str, directory: Path = NET_DIRECTORY) -> str | None:
    """The RDMA device behind a network interface, such as ``mlx5_0``."""
    names = sorted(each.name for each in directory.glob(f"{interface}/device/infiniband/*"))
    return names[0] if names else None


def _ports(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/ports/*"))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return "?"
