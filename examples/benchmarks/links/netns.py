"""Two network namespaces, joined by a link with a delay and a rate (needs root).

The link is a virtual cable with ``tc netem`` where the kernel has that. Where it has not,
``link_emulator.cpp`` (compiled here) carries the packets. A link with a rate and no delay is a cable with
``tc tbf`` on every kernel. Both ends have one address each. Everything is removed at the end.

The delay is that of one direction: a round trip takes twice as long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
NETWORK = "198.18.78"
"""First bytes of all addresses, from the range for such trials (RFC 2544)."""
DEVICE = "eth0"
MTU = 1500
QUEUE_BYTES = 4 << 20
"""Bytes that may wait for the link; what comes then is dropped."""
BURST_BYTES = 2 << 20
"""Bytes that a link without delay carries at once."""
PROBES = 2000
"""Round trips of a calibration."""
CALIBRATED_US = 100.0
"""Delay of the link that is calibrated."""
MOST_HEAD_START_US = 30.0
"""Most microseconds taken off a delay; an idle machine needs some 13."""
PROBE_PORT = 61999
INSIDE = "LOCKSTEP_INSIDE_NETWORK"
"""Environment variable: the name of a network on whose head a process runs."""


@dataclass(frozen=True)
class Link:
    """What a packet meets on its way."""

    delay_us: float = 0.0
    """Microseconds of one direction."""
    gbits: float = 0.0
    """Gigabits per second; 0 is no bound."""

    def __str__(self) -> str:
        return f"{self.delay_us:g} us, " + (f"{self.gbits:g} Gbit/s" if self.gbits else "no bound of bytes")

    def seconds(self, num_bytes: float) -> float:
        """Time from the first byte sent to the last one there."""
        return self.delay_us / 1e6 + (8 * num_bytes / (1e9 * self.gbits) if self.gbits else 0.0)


@dataclass(frozen=True)
class Namespace:
    """One end. What runs there sees its address, loopback, and nothing else."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """Runs a command there, under a host name of its own."""
        named = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, "sh"]

    def run(self, *argv: str, timeout: float = 60.0) -> str:
        """The output of a command there.

        Raises:
            subprocess.CalledProcessError: it fails.
        """
        done = subprocess.run(
            [*self.prefix, *argv], stdout=subprocess.PIPE, text=True, check=True, timeout=timeout
        )
        return done.stdout

    def bytes_sent(self) -> int:
        """Bytes that left this end, as the device counts them."""
        shown = json.loads(ip("-json", "-statistics", "-n", self.name, "link", "show", DEVICE))
        return int(shown[0]["stats64"]["tx"]["bytes"])


class Network:
    """Both ends and the link between them."""

    def __init__(
        self,
        ends: tuple[Namespace, Namespace],
        emulator: subprocess.Popen[str] | None,
        *,
        delays: bool = True,
    ) -> None:
        """``delays``: whether the link can have a delay; else it has a rate only."""
        self.ends = ends
        self._delays = delays
        self._emulator = emulator
        self._head_start_ns = 0
        self.link = Link()

    @property
    def is_emulated(self) -> bool:
        """Whether a process of ours carries the packets."""
        return self._emulator is not None

    def set(self, link: Link) -> None:
        """Change the link; what is under way keeps its times."""
        if self._emulator is not None:
            delay, rate = int(1000 * link.delay_us), int(1e9 * link.gbits)
            self._ask(f"set {delay} {rate} {QUEUE_BYTES} {self._head_start_ns}")
        elif not self._delays:
            for end in self.ends:
                words = f"tbf rate {1000 * link.gbits:g}mbit burst {BURST_BYTES} limit {QUEUE_BYTES}"
                tc(end.name, *f"qdisc replace dev {DEVICE} root {words}".split())
        else:
            shaped = [f"delay {link.delay_us:g}us"] + [f"rate {1000 * link.gbits:g}mbit"] * bool(link.gbits)
            for end in self.ends:
                words = " ".join(shaped).split()
                tc(
                    end.name,
                    "qdisc",
                    "replace",
                    "dev",
                    DEVICE,
                    "root",
                    "netem",
                    "limit",
                    str(QUEUE_BYTES // MTU),
                    *words,
                )
        self.link = link

    def counts(self) -> dict[str, Any]:
        """What passed since the last call, and the emulator's processor time; empty with netem."""
        return {} if self._emulator is None else json.loads(self._ask("count"))

    def calibrate(self) -> float:
        """Take what a packet costs in the emulator off its delays; returns these seconds.

        It is measured by small messages between processes that look, against the same on loopback.
        """
        self._head_start_ns = 0
        self.set(Link(CALIBRATED_US))
        here, there = self.one_way(loopback=True), self.one_way()
        cost = min(max(there - here - CALIBRATED_US / 1e6, 0.0), MOST_HEAD_START_US / 1e6)
        self._head_start_ns = int(1e9 * cost)
        return cost

    def one_way(self, *, loopback: bool = False) -> float:
        """Seconds of a small message between processes that look.

        The 10th percentile, since other work on this machine only adds to them.
        """
        seconds = sorted(self.probe(loopback=loopback)[0])
        return seconds[len(seconds) // 10] / 2

    def probe(
        self,
        what: str = "ping",
        sizes: Sequence[int] = (64,),
        *,
        waiting: str = "looking",
        repeats: int = PROBES,
        loopback: bool = False,
    ) -> list[list[float]]:
        """Seconds of each repeat, by size, of :mod:`plain_sockets` between both ends."""
        first, second = self.ends
        host = "127.0.0.1" if loopback else first.address
        script = [sys.executable, str(Path(__file__).with_name("plain_sockets.py"))]
        with subprocess.Popen(
            [*first.prefix, *script, "listen", host, str(PROBE_PORT)], stdout=subprocess.PIPE, text=True
        ) as listener:
            assert listener.stdout is not None
            try:
                if listener.stdout.readline() != "ready\n":
                    raise OSError(f"nothing listens on {host}:{PROBE_PORT} in {first.name}")
                shown = (first if loopback else second).run(
                    *(*script, "connect", host, str(PROBE_PORT), "--what", what, "--waiting", waiting),
                    *("--repeats", str(repeats), "--json", "--bytes", *map(str, sizes)),
                )
            finally:
                listener.kill()
        found: list[list[float]] = json.loads(shown)
        return found

    def _ask(self, line: str) -> str:
        emulator = self._emulator
        assert emulator is not None
        assert emulator.stdin is not None
        assert emulator.stdout is not None
        emulator.stdin.write(line + "\n")
        emulator.stdin.flush()
        answer = emulator.stdout.readline()
        if not answer:
            raise OSError("the link emulator has ended")
        return answer


def ip(*argv: str) -> str:
    """``ip ARGV``; its output.

    Raises:
        OSError: it fails.
    """
    done = subprocess.run(["ip", *argv], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def tc(name: str, *argv: str) -> None:
    """``tc ARGV`` in a namespace.

    Raises:
        OSError: it fails.
    """
    done = subprocess.run(["tc", "-n", name, *argv], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise OSError(f"tc {' '.join(argv)}: {done.stderr.strip()}")


def why_not() -> str | None:
    """Why there can be no such link here; None if there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("hostname", "hostname")):
        if shutil.which(program) is None:
            return f"needs the program {program} (Debian's package {package})"
    if not has_netem() and not Path("/dev/net/tun").exists():
        return "needs tc netem or /dev/net/tun"
    if shutil.which("g++") is None:
        return "needs g++ (Debian's package g++)"
    return None


def exit_unless_possible() -> None:
    """End a program that needs a network where there can be none.

    Raises:
        SystemExit: why not.
    """
    if problem := why_not():
        raise SystemExit(f"no network namespaces: {problem}")


def has_netem() -> bool:
    """Whether the kernel delays packets itself."""
    name = f"lockstep-{os.getpid()}-netem"
    ip("netns", "add", name)
    try:
        tc(name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except OSError:
        return False
    else:
        return True
    finally:
        ip("netns", "del", name)


def link_of(text: str) -> Link:
    """A link written DELAY[:RATE], in microseconds and Gbit/s.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    delay, _, rate = text.partition(":")
    try:
        link = Link(float(delay), float(rate or 0))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not DELAY_US[:GBITS], as 200:10") from None
    if min(link.delay_us, link.gbits) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a delay and a rate are not below zero")
    return link


def add_flag(parser: argparse.ArgumentParser) -> None:
    """The flag ``--namespaces`` of programs that can run over two hosts."""
    parser.add_argument(
        "--namespaces", nargs="?", type=link_of, const=Link(50, 10), metavar="DELAY_US[:GBITS]",
        help="instances on two hosts, network namespaces with such a link between them (50:10), with a mesh "
        "key; needs root",
    )  # fmt: skip


def rerun_inside(link: Link) -> int | None:
    """Run this same command on the head of a network; returns its exit status.

    None where it runs there already: then :func:`ends_here` has both ends.

    Raises:
        SystemExit: there can be no network here.
    """
    if INSIDE in os.environ:
        return None
    exit_unless_possible()
    with network(link=link) as made:
        command = [*made.ends[0].prefix, sys.executable, *sys.orig_argv[1:]]
        name = made.ends[0].name.removesuffix("-head")
        return subprocess.run(command, env={**os.environ, INSIDE: name}, check=False).returncode


def ends_here() -> tuple[Namespace, Namespace]:
    """Both ends of the network on whose head this process runs."""
    return _ends(os.environ[INSIDE])


def _ends(name: str) -> tuple[Namespace, Namespace]:
    return Namespace(f"{name}-head", f"{NETWORK}.1"), Namespace(f"{name}-other", f"{NETWORK}.2")


@contextlib.contextmanager
def network(name: str = "", link: Link | None = None) -> Iterator[Network]:
    """Two namespaces with a link, which is :class:`Link` ``()`` unless one is given.

    Raises:
        OSError: there can be none here.
    """
    if problem := why_not():
        raise OSError(problem)
    first, second = _ends(name or f"lockstep-{os.getpid()}")
    with contextlib.ExitStack() as stack:
        for end in (first, second):
            ip("netns", "add", end.name)
            stack.callback(ip, "netns", "del", end.name)
        emulator = None
        delays = link is None or link.delay_us > 0 or not link.gbits
        if not delays or has_netem():
            cable = f"link add {DEVICE} netns {first.name} type veth peer name {DEVICE} netns {second.name}"
            ip(*cable.split())
        else:
            emulator = stack.enter_context(_emulator(first, second))
        for end in (first, second):
            ip("-n", end.name, "addr", "add", f"{end.address}/24", "dev", DEVICE)
            ip("-n", end.name, "link", "set", DEVICE, "up", "mtu", str(MTU), "txqueuelen", "1000")
            ip("-n", end.name, "link", "set", "lo", "up")
        made = Network((first, second), emulator, delays=delays)
        if emulator is not None:
            made.calibrate()
        made.set(link or Link())
        yield made


@contextlib.contextmanager
def _emulator(first: Namespace, second: Namespace) -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "link_emulator"
        source = Path(__file__).with_name("link_emulator.cpp")
        subprocess.run(["g++", "-O2", str(source), "-o", str(program)], check=True)
        with subprocess.Popen(
            [str(program), first.name, second.name, DEVICE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as running:
            try:
                assert running.stdout is not None
                if running.stdout.readline() != "ready\n":
                    raise OSError("the link emulator does not start")
                yield running
            finally:
                running.kill()
