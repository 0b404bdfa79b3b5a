"""Large batches of embeddings, and Ollama's streams, while instances are killed."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.engine.pooling.shapes import make_checkpoint
from tests.mesh.harness import Command, Ports, serve
from tests.router import tiny_tokenizer

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

CLIENTS = 4
ROUNDS = 6
"""Requests of each client."""
INPUTS = 64
"""Inputs of each request."""
KILLS = 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = make_checkpoint(tmp_path / "model", "bert", vocab_size=512)
    (tmp_path / "text").mkdir()
    written = tiny_tokenizer.write_model(tmp_path / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((written / name).read_bytes())
    return directory


@pytest.fixture
def embedder(tmp_path: Path, model: Path) -> Iterator[tuple[Command, Ports]]:
    ports = Ports()
    with serve(tmp_path / "log", str(model), "-dp", "3", *ports.head()) as command:
        command.wait_for("3 instances ready")
        yield command, ports


def test_each_input_is_answered_once_and_right(embedder: tuple[Command, Ports]) -> None:
    command, ports = embedder
    draw = random.Random(5)
    texts = [
        " ".join(draw.choices(["dog", "fox", "Hello", "one", "x"], k=draw.choice([1, 9, 90])))
        for _ in range(40)
    ]

    def embeddings(inputs: list[str]) -> list[Any]:
        body = {"input": inputs, "encoding_format": "base64"}
        answer = httpx2.post(f"{ports.url}/v1/embeddings", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        found = answer.json()["data"]
        assert [each["index"] for each in found] == list(range(len(inputs)))
        return [each["embedding"] for each in found]

    alone = {text: embeddings([text])[0] for text in texts}
    answered = threading.Semaphore(0)

    def client(number: int) -> None:
        chance = random.Random(number)
        for _ in range(ROUNDS):
            inputs = chance.choices(texts, k=INPUTS)
            assert embeddings(inputs) == [alone[each] for each in inputs]
            answered.release()

    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(client, number) for number in range(CLIENTS)]
        for kill in range(KILLS):
            assert answered.acquire(timeout=60)
            assert answered.acquire(timeout=60)
            command.child(f"Engine_{kill}").kill()
        for each in running:
            each.result(timeout=90)
    assert command.log.count("taken out") == KILLS


@pytest.mark.nightly
def test_kept_answers_have_the_bits_of_computed_ones(tmp_path: Path, model: Path) -> None:
    ports, flags = Ports(), ("-dp", "2", "-q", "int8", "--pooling-cache", "1M")
    with serve(tmp_path / "log", str(model), *flags, *ports.head()) as command:
        command.wait_for("2 instances ready")

        def embeddings(headers: dict[str, str]) -> Any:
            body = {"input": ["one dog", "Hello fox"], "encoding_format": "base64"}
            answer = httpx2.post(
                f"{ports.url}/v1/embeddings", json=body, headers=headers, timeout=60, trust_env=False
            )
            assert answer.status_code == 200, answer.text
            return answer.json()["data"]

        kept = [embeddings({}) for _ in range(3)]
        computed = [embeddings({"x-data-parallel-rank": rank}) for rank in "01"]
        assert all(each == kept[0] for each in kept + computed)
        page = httpx2.get(f"{ports.url}/metrics", trust_env=False).text
        assert 'lockstep:pooling_cache_total{event="hit"} 4.0' in page
        assert 'lockstep:pooling_cache_total{event="miss"} 2.0' in page


def test_a_death_in_a_stream_of_ollamas_is_not_noticed(tmp_path: Path) -> None:
    ports = Ports()
    body = {
        "messages": [{"role": "user", "content": "Who was at the ball?"}],
        "options": {"seed": 3, "temperature": 1, "num_predict": 600},
    }

    def stream(kills: bool) -> tuple[str, int]:
        parts: list[Any] = []
        with (
            httpx2.Client(timeout=60, trust_env=False) as client,
            client.stream(
                "POST", f"{ports.url}/api/chat", json=body, headers={"x-lockstep-preferred-rank": "0"}
            ) as answer,
        ):
            for line in answer.iter_lines():
                parts.append(json.loads(line))
                if kills and len(parts) == 20:
                    command.child("Engine_0").kill()
        assert parts[-1]["done"]
        return "".join(each["message"]["content"] for each in parts), parts[-1]["eval_count"]

    with serve(tmp_path / "log", "-dp", "2", *ports.head()) as command:
        command.wait_for("2 instances ready")
        undisturbed = stream(kills=False)
        assert stream(kills=True) == undisturbed
        assert "are back" in command.log, "it moved"
