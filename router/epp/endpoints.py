"""Endpoints of a mesh, and the choice among them (pure).

An endpoint is a router: headless instances speak no HTTP. Each router reaches all instances, so the choice
among endpoints is about the routers themselves.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import yaml

FAILURES = 3
"""Failed checks in a row after which an endpoint gets no requests."""
NEAR = 4
"""Requests by which an endpoint on the instance's own host may be ahead of others."""
DEFAULT_PORT = 8000


class EndpointError(ValueError):
    """A text or a file that names no endpoint."""


class EndpointTarget(msgspec.Struct, frozen=True):
    """Configured place of endpoints: a host, or a name with several addresses."""

    host: str
    port: int
    tls: bool = False


class ListedEndpoint(msgspec.Struct, frozen=True):
    """An entry of an endpoints file, whose format is llm-d's."""

    address: str
    port: int | str
    name: str = ""
    labels: dict[str, str] = {}


class EndpointsFile(msgspec.Struct, frozen=True):
    endpoints: list[ListedEndpoint]


@dataclass
class Endpoint:
    """Router that the picker may choose, with its checks and load."""

    address: str
    """IP:port; IPv6 addresses are in brackets."""
    failures: int | None = None
    """Failed checks in a row; None before the first result."""
    in_flight: int = 0
    """Requests that were sent there and have not ended."""
    chosen: int = 0
    """Requests ever sent there; breaks ties in turn."""

    @property
    def host(self) -> str:
        """The IP address alone."""
        return self.address.rpartition(":")[0].strip("[]")


def parsed(text: str) -> EndpointTarget:
    """HOST, HOST:PORT or URL as a target.

    Raises:
        EndpointError: it is none of them.
    """
    scheme, found, rest = text.partition("://")
    if not found:
        scheme, rest = "http", text
    host, colon, port = rest.rstrip("/").rpartition(":")
    if not colon or rest.endswith("]") or (rest.count(":") > 1 and not rest.startswith("[")):
        host, port = rest.rstrip("/"), str(DEFAULT_PORT)
    if scheme not in ("http", "https") or not host or "/" in host or not _is_port(port):
        raise EndpointError(f"{text!r} is no endpoint: write it like 10.0.0.1:8000, or https://host:8000")
    return EndpointTarget(host.strip("[]"), int(port), scheme == "https")


def read_file(text: str) -> list[EndpointTarget]:
    """The targets of an endpoints file.

    Raises:
        EndpointError: it is no YAML, or not of that format.
    """
    try:
        listed = msgspec.convert(yaml.safe_load(text), EndpointsFile)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        reason = " ".join(str(error).split())
        raise EndpointError(f"not an endpoints file (endpoints: [{{address, port}}]): {reason}") from error
    wrong = [each for each in listed.endpoints if not _is_port(str(each.port)) or not each.address]
    if wrong:
        raise EndpointError(f"not an endpoint: address {wrong[0].address!r}, port {wrong[0].port!r}")
    return [EndpointTarget(each.address, int(each.port)) for each in listed.endpoints]


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < 65536


def joined(host: str, port: int) -> str:
    """``IP:port`` with IPv6 in brackets, as Envoy's protocol writes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host in the address of an instance, ``tcp://host:port``; empty if it is a name."""
    host = address.partition("://")[2].rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return ""
    return host


def pick(
    endpoints: Iterable[Endpoint], near: str = "", subset: Container[str] | None = None
) -> Endpoint | None:
    """The endpoint for the next request; None if there is none.

    ``near``: address of the instance's host. ``subset``: the only addresses that the gateway takes.
    """
    able = [each for each in endpoints if subset is None or each.address in subset]
    ready = [each for each in able if each.failures == 0] or [
        each for each in able if each.failures is not None and each.failures < FAILURES
    ]
    return min(
        ready,
        key=lambda each: (each.in_flight - NEAR * (each.host == near), each.chosen, each.address),
        default=None,
    )


def updated(known: Mapping[str, Endpoint], addresses: Iterable[str]) -> dict[str, Endpoint]:
    """Endpoints of these addresses; known ones keep their state."""
    return {address: known.get(address) or Endpoint(address) for address in dict.fromkeys(addresses)}
