"""Check of a running mesh: does its coordinator answer, is each instance reachable?"""

from __future__ import annotations

import asyncio
import contextlib
import time
from urllib.parse import urlsplit

from coordinator.config import MeshConfig
from coordinator.member_connection import fetch_view
from coordinator.messages import Member, View
from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.handshakes import KeyRefused
from coordinator.rpc.keys import MeshKeys
from router.tools.doctor.findings import Finding, broken, note, ok, warning

AREA = "mesh"
STALLED = 5.0
"""Seconds without a step, despite work, from which an instance counts as stalled."""


async def check_mesh(mesh: MeshConfig, keys: MeshKeys | None, timeout: float) -> list[Finding]:
    """Findings about a running mesh: the coordinator's answer, and each instance's port."""
    endpoint = mesh.coordinator_endpoint
    try:
        view = await fetch_view(endpoint, timeout, keys)
    except TimeoutError:
        fix = "start it, or give its address with -dpa and -dpp; a firewall may drop what is sent to it"
        return [broken(AREA, "coordinator", f"nothing answers at {endpoint} within {timeout:g} s", fix)]
    except KeyRefused as error:
        return [broken(AREA, "coordinator", str(error), "use the file that the coordinator was given")]
    except OtherProtocol as error:
        fix = "install the same version everywhere"
        return [broken(AREA, "coordinator", f"{endpoint} is of another version: {error}", fix)]
    return [_coordinator(endpoint, view), *[await _reach(each, timeout) for each in view.members]]


def _coordinator(endpoint: str, view: View) -> Finding:
    count = len(view.members)
    text = f"{endpoint}: epoch {view.epoch}, {count} instance{'s' * (count != 1)}"
    if view.waiting_for:
        return note(AREA, "coordinator", f"{text}; waiting for {view.waiting_for}", "start those")
    if view.refused_peers:
        fix = "look for processes with an old key file"
        return note(
            AREA, "coordinator", f"{text}; refused {view.refused_peers} connections without the key", fix
        )
    return ok(AREA, "coordinator", text)


async def _reach(member: Member, timeout: float) -> Finding:
    """Finding about a connection to the address that routers use, with the instance's state."""
    what = f"instance {member.rank}"
    if not member.address:
        return note(AREA, what, f"on {member.host}: {member.state}, {member.phase}")
    address = urlsplit(member.address)
    began = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or f"no answer within {timeout:g} s"
        fix = f"open the way from here to {member.host}, or choose its address with --instance-address there"
        return broken(AREA, what, f"{member.address} on {member.host} cannot be reached: {reason}", fix)
    took = time.perf_counter() - began
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    text = f"{member.state} at {member.address} on {member.host}, connects in {1e3 * took:.1f} ms"
    if member.load.stalled_for > STALLED:
        fix = f"look at its log (pid {member.pid} on {member.host})"
        return warning(AREA, what, f"{text}; no step for {member.load.stalled_for:.0f} s", fix)
    return ok(AREA, what, text)
