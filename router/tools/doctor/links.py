"""The network between hosts: a child process per host measures (:mod:`engine.probe.links`), this judges."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from coordinator.addresses import is_loopback
from engine.probe.facts import HostFacts, LinkFacts, ProbeFailed, Timing
from engine.probe.links import ProbeRequest
from router.tools.doctor.findings import Finding, broken, note, ok, warning

AREA = "links"

SLOW_LATENCY = 5e-3
"""Seconds for a small all-gather from which a step of many layers is mostly waiting."""
SLOW_BANDWIDTH = 100e6
"""Bytes per second; 1 Gbit/s is 125e6."""
POOR_SHARE = 0.3
"""Part of an interface's speed, below which something other than the cable is the limit."""
MOST_SECONDS = 900.0
"""Most seconds of a whole measurement, whatever the size of the group."""


def ask_links(ask: ProbeRequest) -> LinkFacts | ProbeFailed:
    """Run this host's measuring process, and wait for the group's results."""
    argument = msgspec.json.encode(ask).decode()
    command = [sys.executable, "-P", "-m", "engine.probe.links", argument]
    try:
        done = subprocess.run(command, capture_output=True, timeout=MOST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ProbeFailed(f"not done after {MOST_SECONDS:.0f} s")
    try:
        return msgspec.json.decode(done.stdout, type=LinkFacts)
    except msgspec.ValidationError:
        return msgspec.json.decode(done.stdout, type=ProbeFailed)
    except msgspec.DecodeError:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        return ProbeFailed(f"the child that measures ended with status {done.returncode}: {lines[-1]}")


def check_links(found: LinkFacts | ProbeFailed, ask: ProbeRequest) -> list[Finding]:
    """Findings about the hosts and each pair of them."""
    if isinstance(found, ProbeFailed):
        flags = f"--nnodes {ask.size} --master-addr {ask.master_address} --master-port {ask.master_port}"
        fix = (
            f"run `lockstep doctor {flags} --node-rank RANK` on each host; firewalls must let these ports by"
        )
        return [broken(AREA, "group", found.error, fix)]
    return [*_key(ask), *_hosts(found.hosts), *_differences(found.hosts), *_pairs(found)]


def name_of(host: HostFacts) -> str:
    """Name of a host in the tables."""
    return f"{host.host} ({host.address})"


def _key(ask: ProbeRequest) -> Iterator[Finding]:
    if ask.mesh_key_file is None and not is_loopback(ask.master_address):
        text = "measured without a mesh key: anybody could have taken part"
        yield note(AREA, "key", text, "give --mesh-key-file, as the mesh will need it")


def _hosts(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        speed = f", {host.mbit / 1000:g} Gbit/s" if host.mbit else ""
        text = f"{name_of(host)}: TCP over {host.interface}{speed}, MTU {host.mtu}"
        if host.infiniband:
            text += f"; InfiniBand or RoCE, which TCP does not use: {', '.join(host.infiniband)}"
        if host.faster:
            fix = f"use a faster one: --instance-address (or -dpa) of {', '.join(host.faster)}"
            yield note(AREA, f"node {host.rank}", text, fix)
        else:
            yield ok(AREA, f"node {host.rank}", text)


def _differences(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Findings about what must be the same on all hosts."""

    def each(values: Sequence[object]) -> str:
        return ", ".join(f"{host.host} {value}" for host, value in zip(hosts, values, strict=True))

    if len({host.protocol for host in hosts}) > 1:
        text = f"these versions of Lockstep do not understand each other: {each([h.lockstep for h in hosts])}"
        yield broken(AREA, "versions", text, "install the same version everywhere")
    elif len({host.lockstep for host in hosts}) > 1:
        text = f"Lockstep differs: {each([host.lockstep for host in hosts])}"
        yield warning(AREA, "versions", text, "install the same version everywhere")
    if len({host.torch for host in hosts}) > 1:
        text = f"torch differs: {each([host.torch for host in hosts])}"
        yield warning(AREA, "versions", text, "install the same version everywhere; results may differ")
    if len({host.mtu for host in hosts}) > 1:
        text = f"the MTU differs: {each([host.mtu for host in hosts])}"
        yield warning(AREA, "MTU", text, "ip link set DEVICE mtu, the same on all hosts and switches between")


def _pairs(found: LinkFacts) -> Iterator[Finding]:
    """Findings about each pair of hosts, by its smallest and largest all-gather."""
    for ranks in sorted({tuple(timing.ranks) for timing in found.timings if len(timing.ranks) == 2}):
        gathers = [
            each for each in found.timings if (tuple(each.ranks), each.collective) == (ranks, "all_gather")
        ]
        small = min(gathers, key=lambda each: each.num_bytes)
        large = max(gathers, key=lambda each: each.num_bytes)
        yield _pair([found.hosts[rank] for rank in ranks], small, large)


def _pair(hosts: Sequence[HostFacts], small: Timing, large: Timing) -> Finding:
    what = f"{hosts[0].rank} - {hosts[1].rank}"
    rate = large.bytes_per_second
    slowest = min(host.mbit for host in hosts)
    text = f"latency {small.seconds * 1e6:.0f} us, bandwidth {rate / 1e6:.0f} MB/s"
    if slowest:
        text += f" ({rate * 8e-6 / slowest:.0%} of {slowest / 1000:g} Gbit/s)"
    if hosts[0].host == hosts[1].host:
        text += "; one host: its instances use shared memory instead"
    if small.seconds > SLOW_LATENCY:
        fix = "look for busy cores, Wi-Fi or a long way; without -ep instances need no collectives"
        per_layer = 2e3 * small.seconds
        return warning(
            AREA, what, f"{text}: each layer with spread experts takes {per_layer:.0f} ms longer", fix
        )
    if rate < SLOW_BANDWIDTH:
        return warning(
            AREA, what, f"{text}: slower than 1 Gbit/s", "look at the cables, switches and ethtool"
        )
    if rate * 8 < POOR_SHARE * slowest * 1e6:
        fix = "a larger MTU on all hosts (9000), free cores"
        return note(AREA, what, f"{text}: a small part of what the interfaces can", fix)
    return ok(AREA, what, text)
