"""The addresses of this host, what its name means, and which network NCCL would take."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from coordinator.addresses import Interface, interfaces, is_loopback
from engine.probe.infiniband import active_ports
from router.doctor.findings import Finding, note, ok, warning

AREA = "network"


def check_network(has_gpu: bool) -> list[Finding]:
    """All of it, as it is now."""
    found = interfaces()
    return [
        *check_interfaces(found),
        check_host_name(socket.gethostname(), _addresses_of_name()),
        check_transport(active_ports(), found, os.environ, has_gpu),
    ]


def check_interfaces(found: Sequence[Interface]) -> list[Finding]:
    """One line for each address that others may reach this host at."""
    if not found:
        fix = "for a mesh over several hosts, give this one an address"
        return [note(AREA, "addresses", "loopback only", fix)]
    lines = [ok(AREA, each.name, f"{each.address}, {_speed(each.mbit)}, MTU {each.mtu}") for each in found]
    if len({each.name for each in found}) > 1:
        text = "several interfaces: instances take the one on the way to the coordinator"
        lines.append(note(AREA, "choice", text, "--instance-address chooses another, -dpa the coordinator's"))
    return lines


def _speed(mbit: int) -> str:
    return f"{mbit / 1000:g} Gbit/s" if mbit else "speed unknown"


def check_host_name(name: str, addresses: Sequence[str]) -> Finding:
    """Debian and Ubuntu map a host's own name to 127.0.1.1."""
    if not addresses:
        return note(AREA, "host name", f"{name} has no address here", "give -dpa an address, not this name")
    text = f"{name} is {', '.join(addresses)} here"
    if all(map(is_loopback, addresses)):
        fix = "give -dpa an address, not this name: other hosts would mean themselves"
        return note(AREA, "host name", text, fix)
    return ok(AREA, "host name", text)


def _addresses_of_name() -> list[str]:
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


def check_transport(
    infiniband: Sequence[str], found: Sequence[Interface], environment: Mapping[str, str], has_gpu: bool
) -> Finding:
    """Which network carries collectives: gloo's is the instance's address; NCCL chooses by itself, as its
    variables allow (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)."""
    variables = ", ".join(
        f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith("NCCL_")
    )
    said = f" ({variables})" if variables else ""
    if "GLOO_SOCKET_IFNAME" in environment:
        fix = "--instance-address chooses the interface"
        return note(
            AREA, "transport", "GLOO_SOCKET_IFNAME is ignored: gloo binds to the instance's address", fix
        )
    if not has_gpu:
        hardware = f"; InfiniBand {', '.join(infiniband)} is not used by gloo" if infiniband else ""
        return ok(AREA, "transport", f"no GPU: gloo over TCP on the instance's address{hardware}{said}")
    if infiniband and environment.get("NCCL_IB_DISABLE") == "1":
        text = f"NCCL over sockets, although there is InfiniBand: {', '.join(infiniband)}{said}"
        return warning(AREA, "transport", text, "unset NCCL_IB_DISABLE")
    if infiniband:
        return ok(AREA, "transport", f"NCCL over InfiniBand or RoCE: {', '.join(infiniband)}{said}")
    chosen = environment.get("NCCL_SOCKET_IFNAME")
    usable = [str(each) for each in found]
    if chosen is None and len(usable) > 1:
        text = f"NCCL over a socket of its choice among {', '.join(usable)}{said}"
        return note(AREA, "transport", text, "NCCL_SOCKET_IFNAME names the interface")
    return ok(AREA, "transport", f"NCCL over sockets, {chosen or ', '.join(usable) or 'loopback only'}{said}")
