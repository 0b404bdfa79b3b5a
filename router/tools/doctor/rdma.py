"""UCX and RDMA devices of this host: reading and (pure) judging."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec

from parallel.links import ucx_links
from parallel.links.infiniband import active_ports, ports_that_are_down
from parallel.links.ucx_installation import ADVICE, find_ucx
from router.tools.doctor.findings import Finding, note, ok, warning

AREA = "network"
DEVICE_FILES = Path("/dev/infiniband")
LEAST_LOCKED = 64 << 20
"""Bytes of memory that a process should be able to lock for a device."""
NETWORK = ("tcp", "rc", "ud", "dc")
"""First letters of UCX transports that need a device of the network."""


class Rdma(msgspec.Struct, frozen=True, kw_only=True):
    """UCX and RDMA devices of this host."""

    up: list[str] = []
    """Ports of InfiniBand and RoCE devices, such as ``mlx5_0:1 InfiniBand 200 Gb/sec``."""
    down: list[str] = []
    """Ports that are not up, with their state."""
    locked: int = resource.RLIM_INFINITY
    """Bytes that a process may lock; RLIM_INFINITY: no limit."""
    device_files: list[str] = []
    """Device files for RDMA."""
    closed_files: list[str] = []
    """Device files that this user cannot open."""
    ucx: str | None = None
    """Version and place of UCX; None if it is not installed."""
    has_rdma: bool = False
    """Whether UCX is built for InfiniBand and RoCE."""
    seen: list[tuple[str, str]] = []
    """Transports and devices that UCX sees."""
    problem: str = ""
    """Why UCX cannot be used."""


def read_rdma(files: Path = DEVICE_FILES) -> Rdma:
    """Read the facts as this process sees them; loads UCX if installed."""
    device_files = sorted(map(str, files.glob("uverbs*")))
    found = Rdma(
        up=active_ports(),
        down=ports_that_are_down(),
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        device_files=device_files,
        closed_files=[each for each in device_files if not os.access(each, os.R_OK | os.W_OK)],
    )
    try:
        installation = find_ucx()
    except OSError:
        return found
    found = msgspec.structs.replace(found, ucx=str(installation), has_rdma=installation.has_rdma)
    try:
        version = ucx_links.load().version
        return msgspec.structs.replace(
            found, ucx=f"{version}, {installation.library}", seen=ucx_links.describe()
        )
    except OSError as error:
        return msgspec.structs.replace(found, problem=str(error))


def check_rdma(rdma: Rdma) -> list[Finding]:
    """Findings about UCX, and about what keeps it from the host's RDMA devices."""
    return [_ucx(rdma), *(_devices(rdma) if rdma.up or rdma.down or rdma.device_files else [_none(rdma)])]


def _ucx(rdma: Rdma) -> Finding:
    if rdma.ucx is None:
        text = "not installed: --mesh-transport ucx cannot be used"
        return note(AREA, "UCX", text, ADVICE) if rdma.up else ok(AREA, "UCX", text)
    if rdma.problem:
        return warning(AREA, "UCX", f"{rdma.ucx}: {rdma.problem}", ADVICE)
    names = dict.fromkeys(
        f"{transport} on {device}" if transport.startswith(NETWORK) else transport
        for transport, device in rdma.seen
    )
    return ok(AREA, "UCX", f"{rdma.ucx}: {', '.join(names)}")


def _none(rdma: Rdma) -> Finding:
    text = "no InfiniBand or RoCE device: tensors go over TCP between hosts"
    return ok(AREA, "RDMA", text)


def _devices(rdma: Rdma) -> Iterator[Finding]:
    if rdma.down:
        fix = "check the cable, the switch, and for InfiniBand the subnet manager; `ibstat` shows the port"
        if rdma.up:
            yield note(AREA, "RDMA", f"ports that are not up: {', '.join(rdma.down)}", fix)
        else:
            yield warning(AREA, "RDMA", f"no port is up: {', '.join(rdma.down)}", fix)
    missing = list(_missing(rdma))
    yield from missing
    if rdma.up and not missing:
        text = f"{', '.join(rdma.up)}: --mesh-transport auto takes UCX if all hosts have it"
        yield ok(AREA, "RDMA", text)


def _missing(rdma: Rdma) -> Iterator[Finding]:
    """Missing requirements of an RDMA port that is up."""
    if rdma.up and not rdma.device_files:
        text = f"{rdma.up[0]} has no file {DEVICE_FILES}/uverbs*"
        yield warning(AREA, "RDMA", text, "`modprobe ib_uverbs`; in a container pass /dev/infiniband in")
    if rdma.closed_files:
        text = f"this user cannot open {', '.join(rdma.closed_files)}"
        yield warning(AREA, "RDMA", text, "add the user to the group of these files, or give them mode 0666")
    if rdma.locked != resource.RLIM_INFINITY and rdma.locked < LEAST_LOCKED:
        text = f"a process may lock {rdma.locked >> 10} KiB of memory, which RDMA needs more of"
        yield warning(AREA, "RDMA", text, "`ulimit -l unlimited`, or LimitMEMLOCK=infinity of a systemd unit")
    if rdma.up and rdma.ucx is not None and not rdma.has_rdma:
        text = "UCX was built without InfiniBand and RoCE, as PyPI's wheels are: tensors go over TCP"
        yield warning(AREA, "RDMA", text, ADVICE)
    elif rdma.up and rdma.has_rdma and not rdma.problem and not _sees(rdma):
        text = "UCX is built for it and sees no RDMA device"
        yield warning(AREA, "RDMA", text, "install the device's provider (Debian: ibverbs-providers)")


def _sees(rdma: Rdma) -> bool:
    return any(not transport.startswith("tcp") and ":" in device for transport, device in rdma.seen)
