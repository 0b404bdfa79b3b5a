"""Lines of batches that ask for embeddings, scores and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from engine.messages import BATCH_PRIORITY
from router.config import HttpConfig
from router.mesh import ServedModel
from router.stored.store import AnswerStore
from tests.router.batches.test_endpoints import begun, database_of, ended, line, read
from tests.router.conftest import serving
from tests.router.fake_mesh import FakeMesh
from tests.router.pooled.test_pooled_endpoints import EMBEDDER, script

BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["Hello", "world"]},
    "/v1/score": {"text_1": "Hello", "text_2": ["world", "Hello"]},
    "/rerank": {"query": "Hello", "documents": ["world", "Hello"]},
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


def _unnamed(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in answer.items() if name not in ("id", "created")}
