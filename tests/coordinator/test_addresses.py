"""Which address a host is reached at: clear answers where there are several, or none."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from coordinator import addresses
from coordinator.addresses import AddressError, Interface, is_ipv6, is_loopback, own, reached, toward

TWO = [Interface("eth0", "10.0.0.1"), Interface("eth1", "192.168.7.1")]


@pytest.fixture
def two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "interfaces", lambda: TWO)


def resolves_to(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    def infos(*_args: object, **_kwargs: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", infos)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_is_this_hosts_own(address: str) -> None:
    assert is_loopback(address)
    assert is_loopback(own("-dpa", address))


@pytest.mark.parametrize(
    "name", ["127.example.org", "127.0.0.1.example.org", "127.1.2.3.4", "localhost.example"]
)
def test_names_are_not_loopback_for_how_they_begin(name: str) -> None:
    assert not is_loopback(name)


@pytest.mark.parametrize("name", ["ip6-localhost", "ip6-loopback", "LOCALHOST"])
def test_names_of_loopback(name: str) -> None:
    assert is_loopback(name)


def test_wildcards_are_refused_with_the_addresses_to_choose_from(two_interfaces: None) -> None:
    for address in ("0.0.0.0", "::", "*"):
        with pytest.raises(AddressError, match=r"choose one of this host's: 10.0.0.1 \(eth0\), 192.168.7.1"):
            addresses.check_not_wildcard("-dpa", address)
    addresses.check_not_wildcard("-dpa", "10.0.0.1")


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "::1", "fe80::1%eth0", "head-1.rack_2.example", "localhost", "*"]
)
def test_addresses_and_names(address: str) -> None:
    addresses.check_written("-dpa", address)


@pytest.mark.parametrize(
    "address",
    ["", " ", "a b", "host:29550", "[::1]", "tcp://host", "1::2::3", "host/", "a..b", "h" * 64 + ".b"],
)
def test_what_can_be_no_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="is no address: give a host name or an IP address, no port"):
        addresses.check_written("-dpa", address)


def test_an_address_of_another_host_is_refused(two_interfaces: None) -> None:
    assert own("-dpa", "192.168.7.1") == "192.168.7.1"
    with pytest.raises(AddressError, match=r"-dpa 10.0.0.9 is no address of this host, which has 10.0.0.1"):
        own("-dpa", "10.0.0.9")


def test_a_name_must_mean_one_address_that_others_reach(
    two_interfaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolves_to(monkeypatch, "10.0.0.1", "10.0.0.1")
    assert own("-dpa", "head") == "10.0.0.1"
    resolves_to(monkeypatch, "10.0.0.1", "192.168.7.1")
    with pytest.raises(AddressError, match=r"head means 10.0.0.1 and 192.168.7.1: give the one to use"):
        own("-dpa", "head")
    resolves_to(monkeypatch, "127.0.1.1")
    with pytest.raises(AddressError, match=r"head means 127.0.1.1 on this host, which no other host can"):
        own("-dpa", "head")


def test_a_name_may_mean_ipv6_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "interfaces", lambda: [*TWO, Interface("eth0", "fd00::1")])
    resolves_to(monkeypatch, "fd00::1")
    assert own("--instance-address", "head") == "fd00::1", "others are told the number"
    assert is_ipv6("head")
    assert own("-dpa", "fd00::1") == "fd00::1"
    resolves_to(monkeypatch, "fd00::1", "10.0.0.1")
    assert own("-dpa", "head") == "10.0.0.1"
    assert not is_ipv6("head")


def test_unknown_names_and_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for ask in (lambda: own("-dpa", "nowhere"), lambda: toward("nowhere", 1)):
        with pytest.raises(AddressError, match=r"nowhere.*Name or service not known"):
            ask()


def test_the_way_to_loopback_is_loopback() -> None:
    assert toward("127.0.0.1", 9) == "127.0.0.1"


def test_interfaces_are_usable_by_others() -> None:
    for each in addresses.interfaces():
        assert not is_loopback(each.address)
        assert each.name in str(each)


def test_who_is_reached_is_who_takes_a_connection_within_the_time() -> None:
    """Not reached: a port that refuses, one whose full queue answers nothing, and no address."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listens,
        socket.create_server(("127.0.0.1", 0)) as closed,
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
    ):
        ports = [each.getsockname()[1] for each in (listens, closed, full)]
        closed.close()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:  # the kernel takes one or two, and drops the others' first packet
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", ports[2]))
        peers = {
            "listens": f"127.0.0.1:{ports[0]}",
            "refuses": f"127.0.0.1:{ports[1]}",
            "is silent": f"127.0.0.1:{ports[2]}",
            "no port": "127.0.0.1:x",
            "no such port": "127.0.0.1:99999",
            "nothing": "",
        }
        began = time.monotonic()
        assert asyncio.run(reached(peers, 0.5)) == ("listens",)
        assert time.monotonic() - began < 5.0, "all at once"
        for each in waiting:
            each.close()
    assert asyncio.run(reached({})) == ()


@pytest.mark.parametrize(
    ("here", "is_v6"),
    [
        (TWO, False),
        ([], False),
        ([Interface("eth0", "fd00::7")], True),
        ([*TWO, Interface("eth0", "fd00::7")], False),
    ],
)
def test_an_unknown_name_is_of_ipv6_where_this_host_has_nothing_else(
    here: list[Interface], is_v6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_args: object, **_kwargs: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(addresses, "interfaces", lambda: here)
    assert is_ipv6("coordinator.mesh.svc") is is_v6
