"""Endpoints: how they are written, which is chosen, and how they are found again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from router.epp.endpoint_watch import EndpointWatch
from router.epp.endpoints import (
    FAILURES,
    NEAR,
    Endpoint,
    EndpointError,
    EndpointTarget,
    host_of,
    parsed,
    pick,
    read_file,
    updated,
)
from tests.deploy.files import DEPLOY


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("10.0.0.1:9000", EndpointTarget("10.0.0.1", 9000)),
        ("routers.example", EndpointTarget("routers.example", 8000)),
        ("http://a:80/", EndpointTarget("a", 80)),
        ("https://a:8443", EndpointTarget("a", 8443, tls=True)),
        ("[fd00::1]:9000", EndpointTarget("fd00::1", 9000)),
        ("[fd00::1]", EndpointTarget("fd00::1", 8000)),
        ("fd00::1", EndpointTarget("fd00::1", 8000)),
    ],
)
def test_endpoints_are_read(text: str, target: EndpointTarget) -> None:
    assert parsed(text) == target


@pytest.mark.parametrize("text", ["", ":8000", "a:0", "a:x", "a:70000", "ftp://a:1", "http://a/b:1"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(EndpointError, match="no endpoint"):
        parsed(text)


def test_the_example_file_has_the_format_of_llm_d() -> None:
    text = (DEPLOY / "gateways" / "endpoints.yaml").read_text()
    assert read_file(text) == [EndpointTarget("127.0.0.1", 8000), EndpointTarget("127.0.0.1", 8001)]


@pytest.mark.parametrize(
    "text", ["", "endpoints: 5", "endpoints: [{address: a}]", "endpoints: [{address: a, port: x}]", "{"]
)
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(EndpointError):
        read_file(text)


def test_an_instance_address_names_its_host() -> None:
    assert host_of("tcp://10.0.0.1:4000") == "10.0.0.1"
    assert host_of("tcp://[fd00::1]:4000") == "fd00::1"
    assert host_of("tcp://name:4000") == ""


def endpoints(**in_flight: int) -> list[Endpoint]:
    return [Endpoint(f"{name}:1", 0, count) for name, count in in_flight.items()]


def chosen(found: list[Endpoint], **options: object) -> str | None:
    endpoint = pick(found, **options)
    return endpoint and endpoint.host


def test_the_endpoint_with_the_fewest_requests_is_chosen_and_near_ones_first() -> None:
    assert chosen(endpoints(a=2, b=1)) == "b"
    assert chosen(endpoints(a=NEAR, b=1), near="a") == "a"
    assert chosen(endpoints(a=NEAR + 2, b=1), near="a") == "b"


def test_only_what_the_gateway_allows_is_chosen() -> None:
    assert chosen(endpoints(a=2, b=1), subset=("a:1",)) == "a"
    assert chosen(endpoints(a=2, b=1), subset=()) is None


def test_an_endpoint_that_fails_is_the_last_resort_and_then_none() -> None:
    one, other = found = endpoints(a=0, b=9)
    one.failures = 1
    assert chosen(found) == "b"
    other.failures = 2
    assert chosen(found) == "a"
    one.failures = other.failures = FAILURES
    assert chosen(found) is None
    one.failures = None
    assert chosen(found) is None, "it has not answered yet"


def test_ties_are_broken_in_turn() -> None:
    found = endpoints(a=0, b=0, c=0)
    order = ""
    for _ in range(6):
        endpoint = pick(found)
        assert endpoint is not None
        endpoint.chosen += 1
        order += endpoint.host
    assert order == "abcabc"


def test_known_endpoints_keep_their_counts() -> None:
    (a,) = endpoints(a=3)
    found = updated({"a:1": a}, ["b:1", "a:1", "b:1"])
    assert list(found) == ["b:1", "a:1"]
    assert found["a:1"] is a


def run(work: Callable[[int], Awaitable[None]], answer: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> list[bytes]:
    """Heads that a server at a port got while ``work`` ran with that port."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    async def both() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            await work(server.sockets[0].getsockname()[1])

    asyncio.run(both())
    return heads


def test_endpoints_are_asked_for_their_health() -> None:
    watches = []

    async def look(port: int) -> None:
        watch = EndpointWatch([EndpointTarget("localhost", port)])
        watches.append(watch)
        await watch.look()

    heads = run(look)
    assert heads[0].startswith(b"GET /health HTTP/1.1\r\n")
    assert watches[0].has_ready
    assert (
        watches[0]
        .endpoints[f"127.0.0.1:{heads and next(iter(watches[0].endpoints)).rpartition(':')[2]}"]
        .failures
        == 0
    )


def test_an_endpoint_without_an_instance_is_not_ready() -> None:
    async def look(port: int) -> None:
        watch = EndpointWatch([EndpointTarget("127.0.0.1", port)])
        for failures in (1, 2):
            await watch.look()
            assert watch.endpoints[f"127.0.0.1:{port}"].failures == failures
        assert not watch.has_ready

    run(look, b"HTTP/1.1 503 Service Unavailable\r\n\r\n")


def test_the_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"

    async def look(port: int) -> None:
        def write(*ports: int) -> None:
            listed = "".join(f"  - {{address: 127.0.0.1, port: {each}}}\n" for each in ports)
            file.write_text(f"endpoints:\n{listed}" if ports else "endpoints: 5")

        watch = EndpointWatch(file=str(file))
        await watch.look()
        assert watch.endpoints == {}, "there is no file yet"
        write(port, 1)
        await watch.look()
        assert {name: each.failures for name, each in watch.endpoints.items()} == {
            f"127.0.0.1:{port}": 0,
            "127.0.0.1:1": 1,
        }
        write()
        await watch.look()
        assert len(watch.endpoints) == 2
        write(port)
        await watch.look()
        assert list(watch.endpoints) == [f"127.0.0.1:{port}"]

    run(look)


def test_a_name_that_cannot_be_resolved_keeps_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(port: int) -> None:
        watch = EndpointWatch([EndpointTarget("name.invalid", port)])
        loop = asyncio.get_running_loop()
        found: list[str] = ["127.0.0.1"]

        async def getaddrinfo(host: str, number: int, **_: object) -> list[tuple[object, ...]]:
            if not found:
                raise OSError("no such name")
            return [(2, 1, 6, "", (address, number)) for address in found]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        await watch.look()
        assert watch.has_ready
        found.clear()
        await watch.look()
        assert list(watch.endpoints) == [f"127.0.0.1:{port}"]

    run(look)
