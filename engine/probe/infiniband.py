"""InfiniBand and RoCE ports of this host, from the kernel's files (loads no torch)."""

from __future__ import annotations

from pathlib import Path

CLASS_DIRECTORY = Path("/sys/class/infiniband")


def active_ports(directory: Path = CLASS_DIRECTORY) -> list[str]:
    """``mlx5_0:1 InfiniBand 200 Gb/sec (4X HDR)`` and the like, of the ports that are up."""
    ports = []
    for port in sorted(directory.glob("*/ports/*")):
        if "ACTIVE" in _read(port / "state"):
            device = port.parent.parent.name
            ports.append(f"{device}:{port.name} {_read(port / 'link_layer')} {_read(port / 'rate')}")
    return ports


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return "?"
