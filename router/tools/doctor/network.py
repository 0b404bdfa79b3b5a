"""Network of this host: addresses, its own name, transport of collectives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from coordinator.addresses import Interface, interfaces, is_loopback
from parallel.links.infiniband import active_ports
from router.tools.doctor.findings import Finding, note, ok

AREA = "network"


def check_network(has_gpu: bool) -> list[Finding]:
    """Findings about this host's addresses, name and transport."""
    found = interfaces()
    return [
        *check_interfaces(found),
        check_host_name(socket.gethostname(), _addresses_of_name()),
        check_transport(active_ports(), os.environ, has_gpu),
    ]


def check_interfaces(found: Sequence[Interface]) -> list[Finding]:
    """Finding for each address at which other hosts may reach this one."""
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
    """Finding about the host's own name, which may mean loopback (as on Debian)."""
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


def check_transport(infiniband: Sequence[str], environment: Mapping[str, str], has_gpu: bool) -> Finding:
    """Finding about the transport of collectives between hosts."""
    if "GLOO_SOCKET_IFNAME" in environment:
        fix = "--instance-address chooses the interface"
        text = "GLOO_SOCKET_IFNAME is ignored: links are bound to the instance's address"
        return note(AREA, "transport", text, fix)
    text = "TCP links on the instance's address, which prove the mesh key"
    if has_gpu:
        text += ", through the host's memory (NCCL is not used)"
    if infiniband:
        text += f"; UCX over {', '.join(infiniband)} where all hosts have it"
    return ok(AREA, "transport", text)
