"""The measurement of the network between two hosts, and its findings."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from coordinator.rpc import keys
from engine.probe.facts import LinkFacts, ProbeFailed
from engine.probe.links import ProbeRequest
from tests.mesh.hosts import Host, two_hosts, why_not

pytestmark = pytest.mark.mesh

SECONDS = 60.0
"""Patience of ``--timeout``; everything here ends long before."""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


@pytest.fixture
def key(tmp_path: Path) -> str:
    keys.write(keys.generate(), tmp_path / "mesh.key")
    return str(tmp_path / "mesh.key")


def measure(
    hosts: tuple[Host, Host], of_head: str | None, of_other: str | None, patience: float = SECONDS
) -> list[LinkFacts | ProbeFailed]:
    """What each of the two finds out."""

    def probe(rank: int, key: str | None) -> LinkFacts | ProbeFailed:
        ask = ProbeRequest(
            rank=rank, size=2, master_address=hosts[0].address, master_port=29500, own_address=None,
            timeout=patience, mesh_key_file=key,
        )  # fmt: skip
        argument = msgspec.json.encode(ask).decode()
        done = hosts[rank].run(sys.executable, "-P", "-m", "engine.probe.links", argument, timeout=90)
        return msgspec.json.decode(done.stdout, type=ProbeFailed if '"error"' in done.stdout else LinkFacts)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(probe, (0, 1), (of_head, of_other)))


@pytest.mark.nightly
def test_both_measure_the_same_over_links_with_the_key(hosts: tuple[Host, Host], key: str) -> None:
    one, other = measure(hosts, key, key)
    assert isinstance(one, LinkFacts)
    assert one == other
    assert [each.address for each in one.hosts] == [each.address for each in hosts]
    assert all(each.seconds > 0 for each in one.timings)


def test_who_has_another_key_is_refused_at_once_and_hears_why(
    hosts: tuple[Host, Host], key: str, tmp_path: Path
) -> None:
    keys.write(keys.generate(), tmp_path / "their.key")
    head, other = measure(hosts, key, str(tmp_path / "their.key"), patience=3.0)
    assert isinstance(head, ProbeFailed)
    assert "node rank 1 did not come within 3 s; 1 connections were refused: do all have" in head.error
    assert isinstance(other, ProbeFailed)
    assert f"{hosts[0].address}:29500 is not to be used: it has another mesh key" in other.error


@pytest.mark.nightly
def test_a_firewall_is_named_within_seconds(hosts: tuple[Host, Host], key: str) -> None:
    """What the head answers is lost, so nothing comes back from its port."""
    began = time.monotonic()
    with hosts[0].dropping(hosts[1].address):
        _, other = measure(hosts, key, key, patience=8.0)
    assert isinstance(other, ProbeFailed)
    assert f"no answer at all from {hosts[0].address}:29500 within 5 s: a firewall drops" in other.error
    assert time.monotonic() - began < SECONDS


@pytest.mark.nightly
def test_an_mtu_hole_is_named_on_both_hosts(hosts: tuple[Host, Host], key: str) -> None:
    """The other host takes smaller packets than it says, and the head sends full ones."""
    head, other = hosts
    head.set_link("gso_max_segs", "1", "gso_max_size", "1500")
    other.set_link("mtu", "1000")
    other.announce_segments(1460)
    began = time.monotonic()
    for each in measure(hosts, key, key):
        assert isinstance(each, ProbeFailed)
        assert "small packets pass on the way from there and large ones do not" in each.error
    assert time.monotonic() - began < SECONDS / 2
