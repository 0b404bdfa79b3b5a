"""The example files of gateways: valid, and before a mesh they stream and retry."""

from __future__ import annotations

import http.client
import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.deploy.gateways import (
    CHECKS,
    COMMANDS,
    TwoRouters,
    gateway,
    program,
    status,
    two_routers,
    with_ports,
)
from tests.mesh.faults.load import body_of, undisturbed
from tests.mesh.harness import wait_until

INSIDE = [
    "/metrics",
    "/load",
    "/health",
    "/livez",
    "/version",
    "/server_info",
    "/admin/world",
    "/fault_tolerance/status",
]
"""Paths that are not for clients."""


def needs(name: str) -> None:
    if program(name) is None:
        pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize(
    ("name", "file"), [*((name, file) for name, (file, _) in COMMANDS.items()), ("envoy", "envoy-epp.yaml")]
)
def test_files_are_valid(name: str, file: str, tmp_path: Path) -> None:
    needs(name)
    path = with_ports(file, tmp_path, {})
    checked = subprocess.run(
        [str(program(name)), *CHECKS[name], str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stderr


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRouters]:
    with two_routers(tmp_path_factory.mktemp("mesh")) as found:
        yield found


@pytest.fixture(params=sorted(COMMANDS))
def url(request: pytest.FixtureRequest, mesh: TwoRouters, tmp_path: Path) -> Iterator[str]:
    needs(request.param)
    with gateway(request.param, tmp_path, mesh.ports) as found:
        yield found


def times_of_stream(url: str, tokens: int) -> tuple[float, list[float]]:
    """When a stream was asked for, and when each of its events came."""
    address = urlsplit(url).netloc
    connection = http.client.HTTPConnection(address, timeout=60)
    body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    asked = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    times = []
    while line := answer.readline():
        if line.startswith(b"data: {"):
            times.append(time.monotonic())
    connection.close()
    return asked, times


@pytest.mark.mesh
@pytest.mark.nightly
class TestBeforeAMesh:
    def test_tokens_come_as_they_are_made(self, url: str) -> None:
        asked, times = times_of_stream(url, 300)
        assert len(times) >= 250
        whole = times[-1] - asked
        assert times[20] - asked < whole / 2, "the beginning is not held back"
        distinct = sum(later - earlier > whole / 1000 for earlier, later in itertools.pairwise(times))
        assert distinct > 60, "tokens come one after another"

    def test_answers_are_those_of_the_mesh(self, mesh: TwoRouters, url: str) -> None:
        bodies = [body_of(number, longest=300, most_tokens=40) for number in range(8)]
        direct, through = undisturbed(mesh.url, bodies), undisturbed(url, bodies)
        assert [answer.ids for answer in through] == [answer.ids for answer in direct]

    def test_paths_for_operators_are_kept(self, url: str) -> None:
        assert {path: status(url + path) for path in INSIDE} == dict.fromkeys(INSIDE, 403)

    def test_a_client_that_leaves_is_noticed(self, mesh: TwoRouters, url: str) -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        body = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        connection.sock and connection.sock.close()
        answer.close()
        connection.close()

        def num_running() -> int:
            found = 0
            for router in mesh.urls:
                host = urlsplit(router).netloc
                asked = http.client.HTTPConnection(host, timeout=10)
                asked.request("GET", "/load")
                found += json.load(asked.getresponse())["server_load"]
                asked.close()
            return found

        wait_until(lambda: num_running() == 0, 4, "the request is aborted before its end")


@pytest.mark.mesh
@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_requests_go_on_when_a_router_is_gone(name: str, tmp_path: Path) -> None:
    needs(name)
    with two_routers(tmp_path, instances=1) as mesh, gateway(name, tmp_path, mesh.ports) as url:
        body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
        assert [status(f"{url}/v1/completions", body) for _ in range(4)] == [200] * 4
        mesh.other.process.kill()
        mesh.other.process.wait(10)
        found = [status(f"{url}/v1/completions", body) for _ in range(12)]
        assert found == [200] * 12, "no connection can be made: the other router is asked"
