"""The endpoint picker before a mesh: real Envoy asks it where requests go."""

from __future__ import annotations

import importlib.util
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.messages import State
from tests.deploy.gateways import TwoRouters, by_engine, gateway, metric, program, status, two_routers
from tests.mesh.faults.load import Answer, Load, Verdict, body_of, undisturbed
from tests.mesh.harness import Command, free_port, wait_until

pytestmark = [pytest.mark.mesh, pytest.mark.nightly, pytest.mark.timeout(300)]

FILE = "envoy-epp.yaml"
REQUESTS = "vllm:request_success_total"
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


IN_PIECES = {
    "request_body_mode: BUFFERED": "request_body_mode: FULL_DUPLEX_STREAMED",
    "request_trailer_mode: SKIP": "request_trailer_mode: SEND",
    "response_body_mode: NONE": "response_body_mode: FULL_DUPLEX_STREAMED",
    "response_trailer_mode: SKIP": "response_trailer_mode: SEND",
}
"""What makes the gateway send bodies in pieces, those of answers, too."""


@contextmanager
def picked(
    mesh: TwoRouters, folder: Path, *flags: str, changes: dict[str, str] | None = None
) -> Iterator[tuple[str, Command]]:
    """URL of an Envoy with a picker of this mesh, and the picker."""
    if program("envoy") is None:
        pytest.skip("envoy is not installed: examples/benchmarks/install_peers.sh envoy")
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("the extra epp is not installed")
    port = free_port()
    endpoints = [f"127.0.0.1:{each}" for each in mesh.ports.values()]
    arguments = ["--endpoints", *endpoints, "--grpc-port", str(port), "--grpc-health-port", str(free_port())]
    folder.mkdir(exist_ok=True)
    with Command(folder / "epp.log", "router.epp.command", *arguments, *mesh.join(), *flags) as picker:
        picker.wait_for("endpoint picker at")
        with gateway("envoy", folder, {**mesh.ports, "9002": port}, FILE, changes or {}) as url:
            yield url, picker


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRouters]:
    with two_routers(tmp_path_factory.mktemp("mesh")) as found:
        yield found


def answered(url: str, bodies: Sequence[dict[str, Any]], at_once: int = 8) -> list[Answer]:
    return undisturbed(url, bodies, at_once)


def body(prompt: Sequence[int], tokens: int = 8) -> dict[str, Any]:
    return {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True}  # fmt: skip


def counted(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def served(mesh: TwoRouters, name: str) -> dict[str, float]:
    """A counter by instance, over both routers."""
    found: dict[str, float] = {}
    for url in mesh.urls:
        for engine, value in by_engine(url, name).items():
            found[engine] = found.get(engine, 0.0) + value
    return found


@pytest.mark.parametrize("changes", [{}, IN_PIECES], ids=["whole", "in pieces"])
def test_prefixes_stay_together_and_the_load_spreads(
    mesh: TwoRouters, changes: dict[str, str], tmp_path: Path
) -> None:
    prefixes = [
        [(7 * number + place * (number + 3 + len(changes))) % 3900 + 5 for place in range(320)]
        for number in range(6)
    ]
    with picked(mesh, tmp_path, changes=changes) as (url, _):
        before, hits = served(mesh, REQUESTS), by_engine(mesh.url, HITS)
        requests_before = [sum(metric(each, REQUESTS).values()) for each in mesh.urls]
        queries = by_engine(mesh.url, QUERIES)
        for turn in range(5):
            answered(url, [body([*prefix, 100 + turn, 200 + turn]) for prefix in prefixes])
        shares = counted(before, served(mesh, REQUESTS))
        wait_until(
            lambda: sum(counted(queries, by_engine(mesh.url, QUERIES)).values()) >= 30 * 320, 10, "the counts"
        )
        hit = sum(counted(hits, by_engine(mesh.url, HITS)).values())
        asked = sum(counted(queries, by_engine(mesh.url, QUERIES)).values())
        routers = [
            sum(metric(each, REQUESTS).values()) - count
            for each, count in zip(mesh.urls, requests_before, strict=True)
        ]
    print(f"requests by instance {shares}, by router {routers}, prefix hits {hit / asked:.1%}")
    assert sum(shares.values()) == 30
    assert min(shares.values()) >= 30 * 0.2, "no instance is left out"
    assert hit / asked > 0.7, "of 30 requests with 6 prefixes, 24 could find theirs"
    assert min(routers) >= 30 * 0.2, "no router is left out"


def test_the_router_follows_the_picker(mesh: TwoRouters, tmp_path: Path) -> None:
    """A router alone would send requests with one prefix to one instance."""
    with picked(mesh, tmp_path, "--policy", "round_robin") as (url, _):
        before = served(mesh, REQUESTS)
        for turn in range(8):
            answered(url, [body([*range(1000, 1320), 100 + turn])])
        assert sorted(counted(before, served(mesh, REQUESTS)).values()) == [4, 4]


def num_ready(mesh: TwoRouters) -> int:
    return sum(member.state is State.READY for member in mesh.view().members)


def test_a_killed_instance_costs_no_stream(tmp_path: Path) -> None:
    bodies = [body_of(number, longest=300, most_tokens=160) for number in range(16)]
    with two_routers(tmp_path, flags=["--restart"]) as mesh, picked(mesh, tmp_path / "envoy") as (url, _):
        truth = undisturbed(mesh.url, bodies)
        with Load(url, truth, bodies, streams=8, keeps=False) as load:
            for rank in (0, 1):
                seen = load.verdicts[Verdict.RIGHT]
                wait_until(lambda seen=seen: load.verdicts[Verdict.RIGHT] > seen + 4, 60, "load")
                mesh.command.child(f"Engine_{rank}").send_signal(signal.SIGKILL)
                wait_until(lambda: num_ready(mesh) < 2, 20, "it is missed", every=0.2)
                wait_until(lambda: num_ready(mesh) == 2, 60, "it is back", every=0.2)
            count = load.verdicts[Verdict.RIGHT]
            wait_until(lambda: load.verdicts[Verdict.RIGHT] > count + 8, 60, "more load")
        print({verdict.value: count for verdict, count in load.verdicts.items()})
        assert load.problems == []
        assert set(load.verdicts) == {Verdict.RIGHT}


def test_without_the_picker_requests_still_go_somewhere(mesh: TwoRouters, tmp_path: Path) -> None:
    with picked(mesh, tmp_path) as (url, picker):
        assert picker.stop() == 0
        asked = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
        assert [status(f"{url}/v1/completions", asked) for _ in range(6)] == [200] * 6


def test_without_a_router_the_picker_refuses_with_503(mesh: TwoRouters, tmp_path: Path) -> None:
    with two_routers(tmp_path, instances=1) as alone, picked(alone, tmp_path / "envoy") as (url, picker):
        assert alone.other.stop() == 0
        assert alone.command.stop() == 0
        picker.wait_for("fails its check")
        asked = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
        wait_until(lambda: status(f"{url}/v1/completions", asked) == 503, 20, "503")
