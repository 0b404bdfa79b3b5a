"""Routers of other projects in front of two endpoints of a mesh: what docs/use/other-routers.md promises."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.messages import State
from tests.deploy.gateways import TwoRouters, metric, program, status, two_routers, until_answered
from tests.mesh.faults.load import Load, Verdict, undisturbed
from tests.mesh.faults.load import body_of as ids_body_of
from tests.mesh.harness import free_port, wait_until

pytestmark = [pytest.mark.mesh, pytest.mark.nightly, pytest.mark.timeout(300)]

COMMANDS = {
    "sglang-router": ["launch", "--policy", "round_robin", "--disable-retries"],
    "vllm-router": ["--policy", "round_robin", "--disable-retries"],
    "smg": ["launch", "--policy", "round_robin", "--disable-retries"],
}
REQUESTS = "vllm:request_success_total"
WORDS = [
    "it",
    "was",
    "a",
    "truth",
    "that",
    "she",
    "had",
    "no",
    "wish",
    "to",
    "be",
    "married",
    "and",
    "he",
    "was",
    "not",
    "at",
    "all",
    "in",
    "want",
    "of",
    "her",
]


def body_of(number: int, *, most_tokens: int) -> dict[str, Any]:
    """The body of a request with a text: sglang-router takes no token ids."""
    rng = random.Random(number)
    body = ids_body_of(number, longest=30, most_tokens=most_tokens)
    return body | {"prompt": " ".join(rng.choices(WORDS, k=rng.randint(3, 120)))}


@contextmanager
def before(name: str, mesh: TwoRouters, folder: Path) -> Iterator[str]:
    """URL of one of these routers before both endpoints."""
    found = program(name)
    if found is None:
        pytest.skip(f"{name} is not installed: examples/benchmarks/install_peers.sh {name}")
    port = free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command = [found, *COMMANDS[name], *arguments, "--worker-urls", *mesh.urls]
    with (folder / f"{name}.log").open("w+b") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)
        with until_answered(child, f"http://127.0.0.1:{port}", Path(log.name)) as url:
            yield url


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRouters]:
    with two_routers(tmp_path_factory.mktemp("mesh")) as found:
        yield found


def answer(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as found:
        return json.load(found)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_requests_pass_to_both_endpoints_and_back(name: str, mesh: TwoRouters, tmp_path: Path) -> None:
    bodies = [body_of(number, most_tokens=40) for number in range(8)]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    direct = undisturbed(mesh.url, bodies)
    with before(name, mesh, tmp_path) as url:
        counts = [sum(metric(each, REQUESTS).values()) for each in mesh.urls]
        through = undisturbed(url, bodies)
        assert [(each.ids, each.text) for each in through] == [(each.ids, each.text) for each in direct]
        content = [
            answer(each, "/v1/chat/completions", {**chat, "model": "lockstep-moe"})["choices"][0]["message"][
                "content"
            ]
            for each in (mesh.url, url)
        ]
        assert content[0] == content[1]
        after = [sum(metric(each, REQUESTS).values()) for each in mesh.urls]
    assert all(now - then >= 3 for then, now in zip(counts, after, strict=True)), "both endpoints serve"


def num_ready(mesh: TwoRouters) -> int:
    return sum(member.state is State.READY for member in mesh.view().members)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_killed_instance_costs_no_stream(name: str, tmp_path: Path) -> None:
    bodies = [body_of(number, most_tokens=160) for number in range(16)]
    with two_routers(tmp_path, flags=["--restart"]) as mesh, before(name, mesh, tmp_path) as url:
        truth = undisturbed(mesh.url, bodies)
        with Load(url, truth, bodies, streams=8, keeps=False) as load:
            wait_until(lambda: load.verdicts[Verdict.RIGHT] > 4, 60, "load")
            mesh.command.child("Engine_1").send_signal(signal.SIGKILL)
            wait_until(lambda: num_ready(mesh) < 2, 20, "it is missed", every=0.2)
            wait_until(lambda: num_ready(mesh) == 2, 60, "it is back", every=0.2)
            seen = load.verdicts[Verdict.RIGHT]
            wait_until(lambda: load.verdicts[Verdict.RIGHT] > seen + 8, 60, "more load")
        assert load.problems == []
        assert set(load.verdicts) == {Verdict.RIGHT}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_an_endpoint_that_is_gone_is_left_out(name: str, tmp_path: Path) -> None:
    body = json.dumps({"model": "lockstep-moe", "prompt": "a", "max_tokens": 2}).encode()
    with two_routers(tmp_path, instances=1) as mesh, before(name, mesh, tmp_path) as url:
        assert status(f"{url}/v1/completions", body) == 200
        mesh.other.process.kill()
        mesh.other.process.wait(10)
        wait_until(
            lambda: [status(f"{url}/v1/completions", body) for _ in range(4)] == [200] * 4,
            90,
            "it is left out",
        )
