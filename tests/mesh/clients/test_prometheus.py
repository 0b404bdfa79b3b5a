"""Prometheus scrapes a real mesh: each query of vLLM's boards and of ours returns data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.clients.vllm_boards import CLASSIC, NEWER
from tests.mesh.faults.test_loss import crowd_of
from tests.mesh.harness import Ports, free_port, serve, wait_until

pytestmark = pytest.mark.mesh

OURS = Path(__file__).parents[3] / "docs" / "grafana" / "lockstep.json"
VARIABLES = {
    "$__rate_interval": "30s",
    "$model_name": "lockstep-moe",
    "$engine": ".*",
    "$instance": ".*",
    "$job": "mesh",
}
BALANCED = ("--enable-eplb", "--eplb-config.window_size", "100", "--eplb-config.step_interval", "1000")
"""The board has panels for experts that move."""
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: mesh
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The result of an instant query; an error of the query fails the test."""
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        assert "$" not in query, query
        with urllib.request.urlopen(
            self._url + urllib.parse.urlencode({"query": query}), timeout=20
        ) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        found: list[dict[str, Any]] = said["data"]["result"]
        return found

    def is_up(self) -> bool:
        try:
            return [sample["value"][1] for sample in self.ask("up")] == ["1"]
        except OSError:
            return False


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen a mesh before, during and after some load."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no Prometheus: apt-get install prometheus")
    place, ports, port = tmp_path_factory.mktemp("prometheus"), Ports(), free_port()
    (place / "config.yml").write_text(CONFIG.format(port=ports.http))
    with serve(
        place / "log", "-dp", "2", *ports.head(), "--num-gpu-blocks-override", "600", *BALANCED
    ) as command:
        command.wait_for("2 instances ready")
        with (
            (place / "prometheus.log").open("wb") as log,
            subprocess.Popen(
                [
                    program,
                    f"--config.file={place / 'config.yml'}",
                    f"--storage.tsdb.path={place / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            ) as process,
        ):
            try:
                found = Prometheus(port)
                wait_until(found.is_up, 60, "Prometheus has scraped")
                wait_until(lambda: found.ask("vllm:num_requests_running"), 30, "the first reports")
                crowd_of(ports, 6)
                crowd_of(ports, 6)  # the same prompts again: they are in the prefix caches
                query = "sum(vllm:request_success_total) == 12 and sum(vllm:num_requests_running) == 0"
                wait_until(lambda: found.ask(query), 30, "the end of the load is scraped")
                yield found
            finally:
                process.kill()
        assert command.stop() == 0


def our_queries() -> list[str]:
    board = json.loads(OURS.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize(
    ("board", "queries"), [("classic", CLASSIC), ("newer", NEWER), ("lockstep", our_queries())]
)
def test_every_query_returns_data(scraped: Prometheus, board: str, queries: list[str]) -> None:
    assert len(queries) > 20
    empty, unreal = [], []
    for query in queries:
        samples = scraped.ask(query)
        if not samples:
            empty.append(query)
        elif all(sample["value"][1] == "NaN" for sample in samples):
            unreal.append(query)
    assert not empty
    assert not unreal


def test_what_they_show_is_true(scraped: Prometheus) -> None:
    """Some values, against what was sent: 12 requests of 250 tokens."""

    def total(name: str) -> float:
        return float(scraped.ask(f"sum({name})")[0]["value"][1])

    assert total("vllm:request_success_total") == 12
    assert total("vllm:generation_tokens_total") == 12 * 250
    for name in (
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
        "request_inference_time",
    ):
        assert total(f"vllm:{name}_seconds_count") == 12
    parts = total("vllm:request_prefill_time_seconds_sum") + total("vllm:request_decode_time_seconds_sum")
    assert parts == pytest.approx(total("vllm:request_inference_time_seconds_sum"))
    assert 0 < parts < total("vllm:e2e_request_latency_seconds_sum") * 1.01
    assert total("vllm:iteration_tokens_total_sum") >= 12 * 249
    cached = total("vllm:prompt_tokens_cached_total")
    assert 0 < cached < total("vllm:prompt_tokens_total")
    assert {"lockstep:steps_total", "lockstep:sleeps_total", "lockstep:epoch"} <= {
        name for query in our_queries() for name in re.findall(r"lockstep:\w+", query)
    }
