"""Links between members over UCX, which is how InfiniBand and RoCE are used.

This module loads no torch.

``native/ucx_links.cpp`` fills the table of ``native/links.hpp``. A member's worker is reached by an address
that the members exchange at their meeting place, which does not tell it to a process without the mesh's key.
Nothing beyond that is authenticated, and nothing is encrypted: see docs/run/security.md.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Literal

import psutil

from parallel.compiler import INCLUDE, reason
from parallel.links.forming_group import FormingGroup
from parallel.links.infiniband import active_devices, device_of_interface
from parallel.links.native_links import OFF, LinksTable, NativeLinks
from parallel.links.ucx_installation import Installation, find_ucx
from parallel.native_source import NativeLibrary, NativeSource

logger = logging.getLogger(__name__)

ADDRESS_BYTES = 32 << 10
"""Longest address of a worker."""

Asked = Literal["auto", "ucx"]
"""Whether all members must use UCX, or do so where all have an RDMA device."""

_TEXT_BYTES = 64 << 10
_TRANSPORTS = "^cuda"  # tensors are in the host's memory; UCX would make a CUDA context in every process
_IN_MEMORY = frozenset(("self", "shm", "sm", "mm", "posix", "sysv", "cma", "xpmem", "knem"))
"""Transports on one host, by which UCX cannot tell that a peer is gone."""
_QUIET = {
    "UCX_HANDLE_ERRORS": "none",  # else it takes over the process's signals
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "error",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
_NO_HOOKS = {"UCX_MEM_EVENTS": "n"}  # it rewrites malloc and mmap in memory, which only RDMA needs
_Int, _Address, _Text = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p


class UcxLibrary:
    """The compiled links over UCX, with UCX loaded."""

    def __init__(self, opened: NativeLibrary, installation: Installation) -> None:
        """Raises OSError where UCX itself cannot be loaded."""
        self.installation = installation
        self.version = _open(opened, installation)
        """Version of UCX, such as 1.22.0."""
        self.make: Any = opened.bind("ucx_links", _Int, _Int, _Text, _Text, _Int, _Address, _Int)
        self.address: Any = opened.bind("ucx_address", _Int, _Address, _Int)
        self.connect: Any = opened.bind("ucx_connect", _Int, _Int, _Text, _Address, _Int)
        self.describe: Any = opened.bind("ucx_describe", _Text, _Text, _Address, _Int)
        self.free: Any = opened.bind("ucx_links_free", _Int, result=None)


@cache
def load() -> UcxLibrary:
    """UCX and the links over it, built first if need be.

    Raises:
        OSError: UCX is not installed or cannot be used here; the message says why, and what to do.
    """
    if os.environ.get(OFF) == "0":
        raise OSError(f"links over UCX are native code, which is off ({OFF}=0)")
    installation = find_ucx()
    source = NativeSource(
        path=INCLUDE / "ucx_links.cpp",
        headers=(INCLUDE / "links.hpp", installation.headers / "ucp" / "api" / "ucp.h"),
        flags=(f"-I{installation.headers}",),
        structs={"ucx_links": LinksTable},
        absent="links over UCX:",
    )
    try:
        opened = source.open()
    except (OSError, subprocess.SubprocessError) as error:
        raise OSError(f"links over UCX cannot be built: {reason(error)}") from error
    return UcxLibrary(opened, installation)


def _open(opened: NativeLibrary, installation: Installation) -> str:
    """Load UCX itself; its version."""
    hooks = {} if installation.has_rdma and active_devices() else _NO_HOOKS
    with _environment({**_QUIET, **hooks}):  # UCX reads it while it is loaded
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        opens = opened.bind("ucx_open", _Text, _Address, _Int)
        if not opens(str(installation.library).encode(), text, _TEXT_BYTES):
            raise OSError(f"UCX cannot be loaded: {text.value.decode(errors='replace')}")
    version = text.value.decode()
    logger.info("UCX %s: %s", version, installation)
    return version


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """These variables for a moment, where the user has not set them."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def why_not() -> str | None:
    """Why UCX cannot be used here, and what to do; None if it can."""
    try:
        load()
    except OSError as error:
        return str(error)
    return None


def has_rdma() -> bool:
    """Whether an RDMA device is up here and UCX is built for it."""
    try:
        return bool(active_devices()) and find_ucx().has_rdma
    except OSError:
        return False


class UcxLinks(NativeLinks):
    """One member's links over UCX; nobody is connected before :meth:`connect`."""

    def __init__(
        self,
        library: UcxLibrary,
        rank: int,
        size: int,
        devices: str | None = None,
        transports: str | None = None,
    ) -> None:
        """``devices`` and ``transports`` are UCX_NET_DEVICES and UCX_TLS; None: the environment's, or all.

        Raises:
            OSError: there are no such devices, or no file descriptors left.
        """
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        used = transports or os.environ.get("UCX_TLS", "all")
        notices = not _IN_MEMORY.issuperset(used.split(","))
        address = library.make(
            rank, size, _encoded(devices), _encoded(transports), notices, text, _TEXT_BYTES
        )
        if not address:
            where = f" on {devices}" if devices else ""
            raise OSError(f"UCX cannot be used{where}: {text.value.decode(errors='replace')}")
        super().__init__(address, library.free)
        self._library = library

    def __repr__(self) -> str:
        return super().__repr__().replace("NativeLinks", "UcxLinks")

    @property
    def worker_address(self) -> bytes:
        """Address of this member's worker, for the others.

        Raises:
            OSError: UCX gives none, or one that is too long.
        """
        room = ctypes.create_string_buffer(ADDRESS_BYTES)
        length = self._library.address(self.address, room, ADDRESS_BYTES)
        if not 0 < length <= ADDRESS_BYTES:
            raise OSError(f"UCX gives an address of {length} bytes")
        return room.raw[:length]

    def connect(self, addresses: Sequence[bytes]) -> None:
        """Make the links to all others, whose workers have these addresses, by rank.

        Raises:
            OSError: a peer cannot be reached with the transports that both have.
        """
        for peer, address in enumerate(addresses):
            if peer == self.rank:
                continue
            text = ctypes.create_string_buffer(_TEXT_BYTES)
            if not self._library.connect(self.address, peer, address, text, _TEXT_BYTES):
                raise OSError(f"UCX cannot reach rank {peer}: {text.value.decode(errors='replace')}")


def _encoded(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


def net_devices(host: str) -> str | None:
    """UCX_NET_DEVICES for the interface with this address, and the RDMA device that goes with it.

    That is the interface's own, or, where it has none, all that are up. None where the environment says it,
    or no interface has the address.
    """
    if "UCX_NET_DEVICES" in os.environ:
        return None
    try:
        numeric = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == numeric for each in addresses):
            interface = name.partition(":")[0]
            own = device_of_interface(interface)
            up = active_devices()
            return ",".join([*([each for each in up if each.partition(":")[0] == own] or up), interface])
    return None


def transports() -> str | None:
    """Value for UCX_TLS; None where the environment sets it."""
    return None if "UCX_TLS" in os.environ else _TRANSPORTS


def describe(devices: str | None = None) -> list[tuple[str, str]]:
    """Transports that UCX finds here, each with its device.

    Raises:
        OSError: UCX is not installed, or cannot be used.
    """
    library = load()
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    if not library.describe(_encoded(devices), _encoded(transports()), text, _TEXT_BYTES):
        raise OSError(text.value.decode(errors="replace"))
    last = (line.rpartition(" ")[2] for line in text.value.decode().splitlines() if "resource" in line)
    pairs = (each.partition("/") for each in last if "/" in each)
    return list(dict.fromkeys((transport, device) for transport, _, device in pairs))


def meet(forming: FormingGroup, asked: Asked, *, host: str) -> UcxLinks | None:
    """This member's links to all others, which they meet through an exchange of addresses.

    None where the group keeps to TCP: with ``auto``, unless every member has an RDMA device that is up, and
    all have the same version of UCX. All members of a group ask for the same.

    Args:
        forming: the group, and how long to wait for its members.
        asked: the flag ``--mesh-transport``.
        host: address of the interface to use.

    Raises:
        CollectiveError: somebody does not come.
        ValueError: UCX is asked for, and a member cannot use it.
    """
    rank, size = forming.rank, forming.size
    with ExitStack() as undo:
        links, mine = None, b""
        if asked == "ucx" or has_rdma():
            try:
                library = load()
                links = UcxLinks(library, rank, size, net_devices(host), transports())
                undo.callback(links.close)
                mine = library.version.encode() + b" " + links.worker_address
            except OSError as error:
                logger.warning("no links over UCX: %s", error)
                mine = f"! {error}".encode()
        said = forming.at("ucx").exchange(mine)
        addresses = _agreed([each.partition(b" ") for each in said], asked)
        if links is None or addresses is None:
            return None
        try:
            links.connect(addresses)
        except OSError as error:
            raise ValueError(f"--mesh-transport {asked}: {error}") from error
        undo.pop_all()
        logger.info(
            "tensors between members go over UCX %s on %s: not authenticated, not encrypted",
            load().version, net_devices(host) or os.environ.get("UCX_NET_DEVICES", "all devices"),
        )  # fmt: skip
        return links


def _agreed(said: Sequence[tuple[bytes, bytes, bytes]], asked: Asked) -> list[bytes] | None:
    """Addresses of all workers, if all have one of the same version of UCX.

    Raises:
        ValueError: they have not, and UCX is asked for.
    """
    if len({version for version, _, _ in said}) == 1 and said[0][0] not in (b"", b"!"):
        return [address for _, _, address in said]
    if asked == "auto":
        return None
    for rank, (version, _, text) in enumerate(said):
        if version in (b"", b"!"):
            why = text.decode(errors="replace") or "it was not started with --mesh-transport ucx"
            raise ValueError(f"--mesh-transport ucx: rank {rank} cannot use UCX: {why}")
    named = ", ".join(f"rank {rank} has {version.decode()}" for rank, (version, _, _) in enumerate(said))
    raise ValueError(f"--mesh-transport ucx needs one version of UCX on all hosts: {named}")
