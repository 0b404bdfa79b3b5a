"""Members on two hosts, and networks between them that lose packets."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mesh.hosts import Host, two_hosts, why_not

pytestmark = [pytest.mark.mesh, pytest.mark.nightly]

PORT = 29500
ROOT = Path(__file__).parents[3]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


@pytest.fixture
def members(hosts: tuple[Host, Host]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that form a group, one on each host."""
    made: list[subprocess.Popen[str]] = []
    yield made
    for each in made:
        each.kill()
        each.communicate()


def begin(hosts: tuple[Host, Host], members: list[subprocess.Popen[str]], of_other: str = "") -> None:
    for rank, (host, own) in enumerate(
        zip(hosts, (hosts[0].address, of_other or hosts[1].address), strict=True)
    ):
        words = [str(rank), "2", own, str(PORT), hosts[0].address]
        members.append(
            subprocess.Popen(
                [*host.prefix, sys.executable, "-m", "tests.parallel.links.host_member", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        )


def line_of(member: subprocess.Popen[str]) -> str:
    assert member.stdout is not None
    return member.stdout.readline().strip()


def seconds_in(line: str) -> float:
    found = re.search(r"after ([\d.]+)", line)
    assert found, line
    return float(found[1])


def test_a_cable_that_is_pulled_ends_all_links(
    hosts: tuple[Host, Host], members: list[subprocess.Popen[str]]
) -> None:
    """An idle one after five seconds, one with bytes under way after the group's timeout."""
    begin(hosts, members)
    assert [line_of(each) for each in members] == ["formed", "formed"]
    hosts[1].set_link("down")
    for each in members:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    for member in members[:1]:  # the other one has no network left, so it is not silent
        ends = sorted([line_of(member), line_of(member)])
        assert [end.split()[0] for end in ends] == ["control", "data"]
        assert 4.0 < seconds_in(ends[0]) < 8.0, ends
        assert 2.0 < seconds_in(ends[1]) < 7.0, ends


def test_large_packets_that_are_lost_are_named_while_the_group_forms(
    hosts: tuple[Host, Host], members: list[subprocess.Popen[str]]
) -> None:
    """The other host takes smaller packets than it says, and the head sends full ones."""
    head, other = hosts
    head.set_link("gso_max_segs", "1", "gso_max_size", "1500")
    other.set_link("mtu", "1000")
    other.announce_segments(1460)
    begin(hosts, members)
    answers = [line_of(each) for each in members]
    assert all(seconds_in(answer) < 8.0 for answer in answers), answers
    assert f"rank 0 at {head.address}:" in answers[1]
    assert (
        "did not shake hands within 5.0 s: small packets pass on the way from there and large ones"
        in answers[1]
    )
    assert "rank 1 gave up: rank 0 at" in answers[0]


def test_two_members_that_do_not_reach_each_other_are_named_on_both(
    hosts: tuple[Host, Host], members: list[subprocess.Popen[str]]
) -> None:
    """The meeting place is reached at other addresses than those that the group has."""
    head, other = hosts
    with other.another_address() as own, head.dropping(own):
        begin(hosts, members, of_other=own)
        answers = [line_of(each) for each in members]
    assert all(seconds_in(answer) < 8.0 for answer in answers), answers
    assert re.search(
        f"rank 0 did not answer {own} at {head.address}:.* within 5.0 s: a firewall there may drop",
        answers[1],
    )
    assert f"rank 1 gave up: rank 0 did not answer {own}" in answers[0]
