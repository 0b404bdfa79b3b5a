"""Lines of batches that ask for embeddings, scores and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import msgspec
import openai
import pytest

from engine.messages import BATCH_PRIORITY
from router.config import HttpConfig
from router.mesh import MeshError, Prompt, ServedModel
from router.stored.store import AnswerStore
from tests.router.batches.test_endpoints import begun, database_of, ended, line, read
from tests.router.conftest import serving
from tests.router.fake_mesh import FakeGeneration, FakeMesh
from tests.router.pooled.test_pooled_endpoints import EMBEDDER, good, script

BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["Hello", "world"]},
    "/v1/score": {"text_1": "Hello", "text_2": ["world", "Hello"]},
    "/rerank": {"query": "Hello", "documents": ["world", "Hello"]},
    "/v2/rerank": {"query": "Hello", "documents": ["world", "Hello"]},
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_lines_have_the_answers_of_their_endpoint(endpoint: str, served: ServedModel, tmp_path: Path) -> None:
    mesh = FakeMesh(msgspec.structs.replace(served, pooling=EMBEDDER), script)
    database = database_of(tmp_path / "store")
    asked = {"custom_id": "a", "url": endpoint, "body": {"model": "tiny"} | BODIES[endpoint]}
    with (
        serving(mesh, HttpConfig(), AnswerStore(database)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        batch = ended(client, begun(client, asked, endpoint=endpoint).id)
        assert {prompt.priority for prompt in server.mesh.prompts} == {BATCH_PRIORITY}
        (answer,) = read(client, batch.output_file_id)
        direct = server.post(endpoint, asked["body"]).json()
        assert _unnamed(answer["response"]["body"]) == _unnamed(direct)
        chat = ended(client, begun(client, line("chat")).id)
        (error,) = read(client, chat.error_file_id)
        assert error["response"]["status_code"] == 400
        server.wait_until_idle()
    database.close()


class SmallMesh(FakeMesh):
    """A mesh with room for few requests, that notes how many it had."""

    def __init__(self, served: ServedModel, room: int) -> None:
        super().__init__(msgspec.structs.replace(served, pooling=EMBEDDER), script)
        self.room = room
        self.delay = 0.001
        self.open: list[FakeGeneration] = []
        self.most_of_lines = self.num_refused = 0

    def check_room(self) -> None:
        if len(self._now_open()) >= self.room:
            self._refuse()

    def generate(self, prompt: Prompt) -> FakeGeneration:
        if len(self._now_open()) >= self.room:
            self._refuse()
        generation = super().generate(prompt)
        self.open.append(generation)
        of_lines = sum(each.prompt.priority == BATCH_PRIORITY for each in self.open)
        self.most_of_lines = max(self.most_of_lines, of_lines)
        return generation

    def _now_open(self) -> list[FakeGeneration]:
        self.open = [each for each in self.open if not each.is_closed]
        return self.open

    def _refuse(self) -> NoReturn:
        self.num_refused += 1
        raise MeshError(503, "ServiceUnavailableError", "the queue is full")


@pytest.mark.parametrize("room", [12, 6])
def test_long_lines_leave_room_to_others_and_each_input_is_computed_once(
    served: ServedModel, tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less room than lines may take, what is refused is tried again by itself."""
    monkeypatch.setattr("router.batches.batch_mesh.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("router.batches.batch_mesh.LONGEST_PAUSE", 0.002)
    mesh, database = SmallMesh(served, room), database_of(tmp_path / "store")
    lines = [[[1 + (300 * number + index) % 500, 7] for index in range(300)] for number in range(3)]
    asked = [
        {"custom_id": str(number), "url": "/v1/embeddings", "body": {"model": "tiny", "input": inputs}}
        for number, inputs in enumerate(lines)
    ]
    with (
        serving(mesh, HttpConfig(batch_lines_per_instance=8), AnswerStore(database)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        batch = begun(client, *asked, endpoint="/v1/embeddings")
        while client.batches.retrieve(batch.id).status in ("validating", "in_progress", "finalizing"):
            if room > 8:
                good(server.post("/v1/embeddings", {"model": "tiny", "input": [[9], [8], [7]]}))
        done = ended(client, batch.id)
        assert (done.status, done.request_counts.failed) == ("completed", 0)
        for inputs, answer in zip(lines, read(client, done.output_file_id), strict=True):
            found = [each["embedding"][0] for each in answer["response"]["body"]["data"]]
            assert found == [sum(ids) for ids in inputs]
        of_lines = [each for each in mesh.prompts if each.priority == BATCH_PRIORITY]
        assert len(of_lines) == 900, "each input once"
        assert mesh.most_of_lines == min(room, 8)
        assert (mesh.num_refused > 0) == (room < 8) == bool(server.metrics.store.events["line_tried_again"])
        server.wait_until_idle()
    database.close()


def _unnamed(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in answer.items() if name not in ("id", "created")}
