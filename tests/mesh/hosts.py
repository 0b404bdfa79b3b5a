"""Two hosts on one machine: network namespaces with addresses and names, joined by a cable."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mesh.harness import Command, fork_server

NETWORK = "198.18.77"  # of the range that is reserved for such trials (RFC 2544)


class Host:
    """One namespace. What runs there sees its address, loopback, and nothing else."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"

    @property
    def prefix(self) -> list[str]:
        """Runs a command there, under a host name of its own."""
        named = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, "sh"]

    @contextmanager
    def another_address(self) -> Iterator[str]:
        """One more address of this host, for a while."""
        address = f"{NETWORK}.{100 + int(self.address.rpartition('.')[2])}"
        _must("-n", self.name, "addr", "add", f"{address}/24", "dev", "eth0")
        try:
            yield address
        finally:
            _must("-n", self.name, "addr", "del", f"{address}/24", "dev", "eth0")

    @contextmanager
    def dropping(self, address: str) -> Iterator[None]:
        """What is sent from here to an address is lost without a word."""
        _must("-n", self.name, "route", "add", "blackhole", address)
        try:
            yield
        finally:
            _must("-n", self.name, "route", "del", "blackhole", address)

    def set_link(self, *settings: str) -> None:
        """Settings of the cable's end here, as ``ip link set`` takes them."""
        _must("-n", self.name, "link", "set", "eth0", *settings)

    def announce_segments(self, num_bytes: int) -> None:
        """Have others send segments of so many bytes, whatever the link takes."""
        where = ("dev", "eth0", "src", self.address, "advmss", str(num_bytes))
        _must("-n", self.name, "route", "change", f"{NETWORK}.0/24", *where)

    @contextmanager
    def firewall(self, address: str) -> Iterator[None]:
        """What comes here from an address is dropped without a word, as by a firewall.

        Raises:
            OSError: the kernel has no such filter.
        """
        rule = f"filter add dev eth0 ingress protocol ip prio 1 u32 match ip src {address}/32"
        commands = ("qdisc add dev eth0 ingress", f"{rule} action mirred egress redirect dev hole")
        _must("-n", self.name, "link", "add", "hole", "type", "ifb")  # never up: it takes and drops
        try:
            for command in commands:
                argv = ["tc", "-n", self.name, *command.split()]
                done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
                if done.returncode:
                    raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")
            yield
        finally:
            argv = ["tc", "-n", self.name, "qdisc", "del", "dev", "eth0", "ingress"]
            subprocess.run(argv, capture_output=True, check=False, timeout=30)
            _must("-n", self.name, "link", "del", "hole")

    def command(self, log: Path, module: str, *argv: str) -> Command:
        return Command(log, module, *argv, prefix=self.prefix)

    def run(self, *argv: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command there, to its end, whatever that is."""
        return subprocess.run(
            [*self.prefix, *argv], capture_output=True, text=True, check=False, timeout=timeout
        )

    def lockstep(self, *argv: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        code = "import sys; from router.launcher.serve import main; sys.exit(main(sys.argv[1:]))"
        return self.run(sys.executable, "-P", "-c", code, *argv, timeout=timeout)

    def ask(self, url: str, body: object = None, headers: dict[str, str] | None = None) -> Any:
        """The answer to an HTTP request made there; parsed if it is JSON."""
        code = (
            "import json, sys, urllib.request as u\n"
            "url, body, headers = json.loads(sys.argv[1])\n"
            "data = json.dumps(body).encode() if body is not None else None\n"
            "request = u.Request(url, data, {'Content-Type': 'application/json', **headers})\n"
            "print(u.urlopen(request, timeout=60).read().decode())"
        )
        done = self.run(sys.executable, "-P", "-c", code, json.dumps([url, body, headers or {}]))
        assert done.returncode == 0, done.stderr
        try:
            return json.loads(done.stdout)
        except ValueError:
            return done.stdout

    def listening(self) -> set[str]:
        """Addresses on which anything listens there."""
        lines = self.run("cat", "/proc/net/tcp", "/proc/net/tcp6").stdout.splitlines()
        rows = [line.split() for line in lines if "local_address" not in line]
        return {_readable(row[1].partition(":")[0]) for row in rows if row[3] == "0A"}  # LISTEN


def _readable(kernels: str) -> str:
    """An address of /proc/net/tcp: hexadecimal, in words of 32 bits with the last byte first."""
    words = [bytes.fromhex(kernels[at : at + 8])[::-1] for at in range(0, len(kernels), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def why_not() -> str | None:
    """Why such hosts cannot be made here, None if they can."""
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("hostname", "hostname")):
        if shutil.which(program) is None:
            return f"needs the program {program} (Debian's package {package})"
    trial = f"lockstep-{os.getpid()}-trial"
    made = _ip("netns", "add", trial)
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    _ip("netns", "del", trial)
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """A head and another host; both are gone afterwards, with the cable."""
    hosts = [Host(f"lockstep-{os.getpid()}-{role}", number) for number, role in ((1, "head"), (2, "other"))]
    made: list[Host] = []
    try:
        for host in hosts:
            _must("netns", "add", host.name)
            made.append(host)
        head, other = hosts
        _must(
            *("link", "add", "eth0", "netns", head.name, "type", "veth"),
            *("peer", "name", "eth0", "netns", other.name),
        )
        for host in hosts:
            for command in (
                ("addr", "add", f"{host.address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                _must("-n", host.name, *command)
        yield head, other
    finally:
        for host in made:
            fork_server(*host.prefix).close()
            _ip("netns", "del", host.name)


def _ip(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *argv], capture_output=True, text=True, check=False, timeout=30)


def _must(*argv: str) -> None:
    done = _ip(*argv)
    assert done.returncode == 0, f"ip {' '.join(argv)}: {done.stderr}"
