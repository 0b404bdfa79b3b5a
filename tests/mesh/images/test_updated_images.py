"""New weights under running requests with images: nothing is answered from old ones."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.weight_versions.made import trained
from tests.mesh.harness import Ports, free_port, serve
from tests.mesh.images.test_counts import images_of
from tests.mesh.images.test_images import NUM_TOKENS, QUESTIONS, expected_of, messages

pytest.importorskip("PIL.Image")

pytestmark = [pytest.mark.mesh, pytest.mark.nightly, pytest.mark.timeout(800)]

UPDATES = 6


class Seeing(threading.Thread):
    """Requests with the same pictures at any instance, without a break, over all updates."""

    def __init__(self, ports: Ports, length: int) -> None:
        """``length``: tokens of an answer; long ones go on over an update."""
        super().__init__()
        self._ports, self._length = ports, length
        self.ends = threading.Event()
        self.count = 0
        self.problem: Exception | None = None

    def run(self) -> None:
        draw = random.Random(self._length)
        try:
            with openai.OpenAI(base_url=f"{self._ports.url}/v1", api_key="x", max_retries=0) as client:
                while not self.ends.is_set():
                    ask(client, draw.choice(QUESTIONS), draw.randrange(2), self._length)
                    self.count += 1
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            self.problem = error


def ask(
    client: openai.OpenAI, question: tuple[str | int, ...], rank: int, length: int = NUM_TOKENS
) -> list[int]:
    answer: Any = client.chat.completions.create(
        model="m", messages=messages(*question), temperature=0, max_tokens=length,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        extra_headers={"x-data-parallel-rank": str(rank)},
    )  # fmt: skip
    token_ids: list[int] = answer.choices[0].model_extra["token_ids"]
    return token_ids


def test_answers_after_each_update_are_those_of_its_weights(tmp_path: Path) -> None:
    """Each version's are transformers', which has no cache."""
    import torch

    from tests.engine.vision.tiny_vision_models import make_tiny_chat_model

    def of_tower(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_part = "vision" in name and tensor.is_floating_point()
        return tensor * 1.5 + 0.1 if is_part else tensor

    first = make_tiny_chat_model(tmp_path / "v0")
    tower = trained(first, tmp_path / "v1", change=of_tower)
    directories = [first, tower, trained(tower, tmp_path / "v2", seed=2)]
    expected = [expected_of(directory) for directory in directories]
    assert all(one != other for one, other in zip(expected[0][:3], expected[1][:3], strict=True))
    assert expected[0][3] == expected[1][3], "the tower alone changes, and nothing without a picture"

    ports, admin, draw = Ports(), free_port(), random.Random(3)
    flags = ["-dp", "2", "--served-model-name", "m", "--dtype", "float32", "--admin-port", str(admin)]
    with contextlib.ExitStack() as stack:
        command = stack.enter_context(serve(tmp_path / "serve.log", str(first), *flags, *ports.head()))
        command.wait_for("2 instances ready")
        client = stack.enter_context(openai.OpenAI(base_url=f"{ports.url}/v1", api_key="x", max_retries=0))
        beside = [Seeing(ports, length) for length in (NUM_TOKENS, 400)]
        for each in beside:
            each.start()
            stack.callback(each.ends.set)
        for update in range(1, UPDATES + 1):
            version = update % 3
            body = {
                "model_path": str(directories[version]),
                "in_flight": draw.choice(("keep", "recompute", "finish")),
            }
            data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
            url = f"http://127.0.0.1:{admin}/update_weights_from_disk"
            with urllib.request.urlopen(urllib.request.Request(url, data, kind), timeout=120) as answer:
                assert json.load(answer)["success"]
            for rank in draw.sample((0, 1), 2):
                for _ in range(2):  # the second time out of the caches
                    found = [ask(client, question, rank) for question in QUESTIONS]
                    assert found == expected[version], f"update {update}, {body['in_flight']}, {rank}"
            assert [each.problem for each in beside] == [None, None]
        for each in beside:
            each.ends.set()
            each.join()
        metrics = client._client.get(f"{ports.url}/metrics").text
        counts = [images_of(metrics, rank) for rank in (0, 1)]
        print(f"{[each.count for each in beside]} answers beside; images: {counts}")
        assert all(each["encoded"] >= 2 * UPDATES and each["cached"] > UPDATES for each in counts), counts
        assert command.stop() == 0
        assert "Traceback" not in command.log
