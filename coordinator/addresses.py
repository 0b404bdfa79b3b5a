"""Addresses of this host: how other hosts reach it, and which hosts it reaches."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence

import msgspec

HOST_NAME = re.compile(r"[\w.-]+")
WILDCARDS = ("0.0.0.0", "::", "*")
LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})
"""Names that mean loopback on every host; the latter two in Debian's /etc/hosts, for IPv6."""


CONNECT_SECONDS = 2.0
"""Seconds after which a connection that is not made counts as impossible."""


class AddressError(ValueError):
    """An address that others cannot reach, or that is not this host's.

    The message says what there is.
    """


class Interface(msgspec.Struct, frozen=True):
    """One address of this host."""

    name: str
    address: str
    mbit: int = 0
    """Speed of the interface in Mbit/s; 0 if the system does not report it."""
    mtu: int = 0

    def __str__(self) -> str:
        return f"{self.address} ({self.name})"


def is_loopback(address: str) -> bool:
    """Whether only this host can reach the address, judged by its spelling."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() in LOOPBACK_NAMES


def is_ipv6(address: str) -> bool:
    """Whether a host is an IPv6 address, or a name that resolves to nothing else.

    A name that cannot be resolved yet counts as one on a host that has no other addresses itself.
    """
    known = means_ipv6(address)
    if known is None:  # as before a pod is ready: a listener that is made now keeps its kind
        return all(":" in each.address for each in interfaces() or [Interface("", "127.0.0.1")])
    return known


def means_ipv6(address: str) -> bool | None:
    """As :func:`is_ipv6`, but None for a name that cannot be resolved now.

    For a name it may take seconds.
    """
    if ":" in address:
        return True
    with contextlib.suppress(ValueError):
        ipaddress.IPv4Address(address)
        return False
    try:
        infos = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except UnicodeError:
        return False
    except OSError:
        return None
    return all(":" in str(info[4][0]) for info in infos)


def interfaces() -> list[Interface]:
    """The addresses at which other hosts may reach this one, IPv4 first.

    They belong to interfaces that are up; loopback and link-local addresses are left out.
    """
    import psutil  # takes a tenth of a coordinator's start, which rarely asks

    try:
        stats = psutil.net_if_stats()
    except OSError:  # an emulated kernel knows no speeds
        return []
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if name not in stats or not stats[name].isup:
            continue
        for item in addresses:
            if item.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(item.address.partition("%")[0])
            if not (address.is_loopback or address.is_link_local):
                found.append(Interface(name, str(address), stats[name].speed, stats[name].mtu))
    return sorted(found, key=lambda each: ":" in each.address)


def choices(found: Sequence[Interface]) -> str:
    """The addresses to choose from, for an error message."""
    return ", ".join(map(str, found)) or "none but loopback"


def check_written(flag: str, address: str) -> None:
    """Check that an address is spelled as a host name or an IP address.

    Raises:
        AddressError: it is not.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(address)
        return
    if address not in WILDCARDS and not _can_be_name(address):
        raise AddressError(f"{flag} {address!r} is no address: give a host name or an IP address, no port")


def _can_be_name(text: str) -> bool:
    try:
        text.encode("idna")  # as the resolver does, whose error is no OSError: parts of 1 to 63 bytes
    except UnicodeError:
        return False
    return HOST_NAME.fullmatch(text) is not None


def check_not_wildcard(flag: str, address: str) -> None:
    """Refuse a wildcard: the address is also sent to others, so it cannot be all.

    Raises:
        AddressError: it is.
    """
    if address in WILDCARDS:
        raise AddressError(
            f"{flag} {address} names no address that others could connect to; choose one of this host's: "
            f"{choices(interfaces())}"
        )


def own(flag: str, address: str) -> str:
    """The numeric form of an address of this host, to bind to.

    Raises:
        AddressError: it is not this host's, or a name that does not mean exactly one address.
    """
    numeric = _resolve(flag, address)
    ours = [each.address for each in interfaces()]
    if numeric != address and is_loopback(numeric) and not is_loopback(address):
        raise AddressError(
            f"{flag} {address} means {numeric} on this host, which no other host can reach; give one of: "
            f"{choices(interfaces())}"
        )
    if not is_loopback(numeric) and numeric not in ours:
        raise AddressError(f"{flag} {address} is no address of this host, which has {choices(interfaces())}")
    return numeric


def is_own(address: str) -> bool:
    """Whether it is an address of this host."""
    try:
        own("", address)
    except AddressError:
        return False
    return True


def _resolve(flag: str, address: str) -> str:
    try:
        infos = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"{flag} {address} cannot be resolved: {error.strerror}") from error
    numeric = list(dict.fromkeys(str(info[4][0]) for info in infos))
    of_one_kind = [each for each in numeric if ":" not in each] or numeric
    if len(of_one_kind) > 1:
        raise AddressError(f"{flag} {address} means {' and '.join(of_one_kind)}: give the one to use")
    return of_one_kind[0]


def toward(address: str, port: int) -> str:
    """This host's address on the way to another one, by its routes; nothing is sent.

    Raises:
        AddressError: there is no way.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise AddressError(
            f"this host has no way to {address}: {error.strerror}; it has {choices(interfaces())}"
        ) from error


async def reached(peers: Mapping[str, str], timeout: float = CONNECT_SECONDS) -> tuple[str, ...]:
    """Names of those whose host:port accepts a connection from here, all tried at once."""
    found = await asyncio.gather(*(_connects(address, timeout) for address in peers.values()))
    return tuple(name for name, connects in zip(peers, found, strict=True) if connects)


async def _connects(address: str, timeout: float) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, OverflowError, TimeoutError, ValueError):
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
        return True
    return False
