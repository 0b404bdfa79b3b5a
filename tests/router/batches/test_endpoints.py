"""The batch API as OpenAI's client speaks it: a real server, a scripted mesh."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.messages import BATCH_PRIORITY, FinishReason
from router.config import HttpConfig
from router.mesh import MeshError, Prompt, ServedModel
from router.metrics.metrics import Metrics
from router.stored.database import StoreDatabase
from router.stored.store import AnswerStore
from router.text.tokens import Tokenizer
from tests.router.conftest import Server, ids_of, serving
from tests.router.fake_mesh import FakeGeneration, FakeMesh, saying
from tests.waiting import until

TEXT = " Hello world!"
SAID = " Hello world"
KEYS = ("one", "two")
CONFIG = HttpConfig(api_key=KEYS, batch_max_lines=8, batch_max_file_bytes=100_000)


def database_of(place: Path | str, most_bytes: int = 1 << 20) -> StoreDatabase:
    return StoreDatabase(place, most_bytes=most_bytes, lasts=False)


@pytest.fixture
def mesh(served: ServedModel, tokenizer: Tokenizer) -> FakeMesh:
    return FakeMesh(served, saying(ids_of(tokenizer, TEXT), FinishReason.STOP))


@pytest.fixture
def server(mesh: FakeMesh, endpoint_place: Path | str) -> Iterator[Server]:
    database = database_of(endpoint_place)
    with serving(mesh, CONFIG, AnswerStore(database)) as server:
        yield server
    database.close()


@pytest.fixture
def clients(server: Server) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    one, two = (openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) for key in KEYS)
    with one, two:
        yield one, two


def line(id: str, url: str = "/v1/chat/completions", **body: object) -> dict[str, Any]:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": id}]}
    return {"custom_id": id, "method": "POST", "url": url, "body": chat | body}


def file_of(*lines: object) -> io.BytesIO:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    file = io.BytesIO(text.encode())
    file.name = "lines.jsonl"
    return file


def begun(client: openai.OpenAI, *lines: object, endpoint: str = "/v1/chat/completions") -> Any:
    file = client.files.create(file=file_of(*lines), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
        metadata={"about": "tests"},
    )


def ended(client: openai.OpenAI, id: str) -> Any:
    until(lambda: client.batches.retrieve(id).status in ("completed", "failed", "cancelled", "expired"))
    return client.batches.retrieve(id)


def read(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    return [] if file is None else [json.loads(each) for each in client.files.content(file).text.splitlines()]


def test_openais_batch_example_runs_unchanged(
    server: Server, clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    client, foreign = clients
    batch = begun(client, line("a"), line("b"), "", line("wrong", temperature=-1))
    assert (batch.status, batch.metadata) == ("validating", {"about": "tests"})
    done = ended(client, batch.id)
    assert (done.status, done.errors) == ("completed", None)
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    answers, errors = read(client, done.output_file_id), read(client, done.error_file_id)
    assert [each["custom_id"] for each in answers] == ["a", "b"]
    first = answers[0]
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert (first["response"]["status_code"], first["error"]) == (200, None)
    assert first["response"]["body"]["choices"][0]["message"]["content"] == SAID
    assert errors[0]["custom_id"] == "wrong"
    assert errors[0]["response"]["status_code"] == 400
    assert "temperature" in errors[0]["response"]["body"]["error"]["message"]
    assert {prompt.priority for prompt in server.mesh.prompts} == {BATCH_PRIORITY}
    assert not server.metrics.requests.ttft.totals(), "nobody waited for their tokens"
    assert [each.id for each in client.batches.list()] == [batch.id]
    files = [each.id for each in client.files.list(order="asc")]
    assert files == [done.input_file_id, done.output_file_id, done.error_file_id]
    for call in (
        lambda: foreign.batches.retrieve(batch.id),
        lambda: foreign.batches.cancel(batch.id),
        lambda: foreign.files.retrieve(done.input_file_id),
        lambda: foreign.files.content(done.output_file_id),
        lambda: foreign.files.delete(done.output_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert not list(foreign.files.list())
    client.files.delete(done.output_file_id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(done.output_file_id)
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [("/v1/completions", {"prompt": "Hello"}), ("/v1/responses", {"input": "Hello"})],
)
def test_lines_may_be_completions_and_responses(
    clients: tuple[openai.OpenAI, openai.OpenAI], endpoint: str, body: dict[str, Any]
) -> None:
    client, _ = clients
    wanted = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "tiny", **body}}
    done = ended(client, begun(client, wanted, endpoint=endpoint).id)
    (answer,) = read(client, done.output_file_id)
    body = answer["response"]["body"]
    text = body["output"][0]["content"][0]["text"] if "output" in body else body["choices"][0]["text"]
    assert text == SAID


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["{no json"], "invalid_json_line", 1),
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a", url="/v1/completions")], "mismatched_url", 1),
        ([line("a") | {"method": "GET"}], "invalid_method", 1),
        ([line("a", stream=True)], "invalid_body", 1),
        ([{"custom_id": "a"}], "invalid_json_line", 1),
        ([line(str(number)) for number in range(9)], "too_many_lines", None),
        (["", " "], "empty_file", None),
    ],
)
def test_a_wrong_file_is_named_line_by_line_and_nothing_of_it_runs(
    server: Server,
    clients: tuple[openai.OpenAI, openai.OpenAI],
    lines: list[object],
    code: str,
    number: int | None,
) -> None:
    client, _ = clients
    failed = ended(client, begun(client, *lines).id)
    assert failed.status == "failed"
    assert [(each.code, each.line) for each in failed.errors.data] == [(code, number)]
    assert not server.mesh.prompts
    with pytest.raises(openai.BadRequestError, match="failed cannot be cancelled"):
        client.batches.cancel(failed.id)


def test_a_cancelled_batch_keeps_what_it_has(
    server: Server, clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    client, _ = clients
    quick = server.mesh.script
    server.mesh.script = lambda prompt: (
        quick(prompt) if len(server.mesh.prompts) < 2 else []
    )  # the rest hangs
    batch = begun(client, *(line(each) for each in "abcd"))
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 2)
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    for _ in range(2):
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended(client, batch.id)
    assert (done.status, len(read(client, done.output_file_id))) == ("cancelled", 2)
    assert [each["error"]["code"] for each in read(client, done.error_file_id)] == ["batch_cancelled"] * 2
    server.wait_until_idle()


def test_lines_that_no_instance_takes_wait(
    server: Server, clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    client, _ = clients
    server.mesh.refusal = MeshError(503, "ServiceUnavailableError", "nobody")
    batch = begun(client, line("a"))
    until(lambda: 'event="line_tried_again"} 0.0' not in server.client.get("/metrics").text)
    server.mesh.refusal = None
    assert ended(client, batch.id).request_counts.completed == 1


def test_bad_uploads_and_batches_are_refused(
    server: Server, clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    client, foreign = clients
    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=io.BytesIO(b"x" * 200_000), purpose="batch")
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=file_of(line("a")), purpose="assistants")
    file = client.files.create(file=file_of(line("a")), purpose="batch")
    wanted: dict[str, Any] = {
        "input_file_id": file.id,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    for change in (
        {"endpoint": "/v1/moderations"},
        {"completion_window": "soon"},
        {"input_file_id": "file-nobody"},
        {"metadata": {"k" * 65: "v"}},
    ):
        with pytest.raises(openai.BadRequestError):
            client.batches.create(**(wanted | change))
    with pytest.raises(openai.BadRequestError):
        foreign.batches.create(**wanted)
    auth = {"authorization": "Bearer one"}
    assert server.client.post("/v1/files", json={}, headers=auth).status_code == 415
    form = {"file": ("a", b"x")}
    for fields in ({"files": form}, {"content": b"x", "headers": {"content-type": "multipart/form-data"}}):
        given = {**fields, "headers": auth | fields.get("headers", {})}
        message = server.client.post("/v1/files", **given).json()["error"]["message"]
        assert message in (
            "purpose must be batch, there is none.", "POST /v1/files: Missing boundary in multipart."
        )  # fmt: skip
    web = server.client.post("/v1/files", files=form, headers=auth | {"sec-fetch-site": "cross-site"})
    assert web.status_code == 403
    assert server.client.post("/v1/files", data={"purpose": "batch"}, headers=auth).status_code == 415
    for limit in ("x", "0", "00000001000", "000000001" + "0" * 5000):
        assert server.client.get(f"/v1/files?limit={limit}", headers=auth).status_code == 400
    assert server.client.get("/v1/batches?after=x", headers=auth).status_code == 400


class CountingMesh(FakeMesh):
    """A mesh that notes how many requests it had at once."""

    most_open = 0

    def generate(self, prompt: Prompt) -> FakeGeneration:
        generation = super().generate(prompt)
        self.most_open = max(self.most_open, self.num_open)
        return generation


def test_samples_of_a_line_wait_for_places_like_lines(
    served: ServedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    mesh = CountingMesh(served, saying(ids_of(tokenizer, TEXT), FinishReason.STOP))
    mesh.delay = 0.001
    database = database_of(tmp_path / "answers")
    with (
        serving(mesh, HttpConfig(batch_lines_per_instance=3), AnswerStore(database)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        batch = ended(client, begun(client, line("a", n=10), line("b", n=10)).id)
        answers = read(client, batch.output_file_id)
        said = [
            choice["message"]["content"] for each in answers for choice in each["response"]["body"]["choices"]
        ]
        assert said == [SAID] * 20
        assert (len(mesh.generations), mesh.most_open) == (20, 3)
        server.wait_until_idle()
    database.close()


def test_another_router_goes_on_with_the_lines_that_have_no_answer(
    served: ServedModel, tokenizer: Tokenizer, endpoint_place: Path | str
) -> None:
    quick = saying(ids_of(tokenizer, TEXT), FinishReason.STOP)
    dying = FakeMesh(served, quick)
    dying.script = lambda prompt: quick(prompt) if len(dying.prompts) < 3 else []
    lines = [line(each, temperature=0.9) for each in "abcdef"]
    database = database_of(endpoint_place)
    with (
        serving(dying, HttpConfig(), AnswerStore(database)) as first,
        openai.OpenAI(base_url=first.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        batch = begun(client, *lines)
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 3)
    database.close()
    database, living = database_of(endpoint_place), FakeMesh(served, quick)
    with (
        serving(living, HttpConfig(), AnswerStore(database)) as second,
        openai.OpenAI(base_url=second.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        done = ended(client, batch.id)
        assert [each["custom_id"] for each in read(client, done.output_file_id)] == list("abcdef")
        assert len(living.prompts) == 3, "no line is answered twice"
        seeds = {prompt.request_id: prompt.seed for prompt in dying.prompts}
        assert all(seeds[prompt.request_id] == prompt.seed for prompt in living.prompts)
    database.close()


def test_a_batch_whose_time_is_over_names_the_lines_that_were_not_run(
    served: ServedModel, tokenizer: Tokenizer, endpoint_place: Path | str
) -> None:
    from router.batches.batch_runs import BatchRuns
    from router.batches.objects import BatchObject, BatchState
    from router.batches.routes import batch_runs

    async def run(mesh: FakeMesh, runs: BatchRuns) -> BatchObject | None:
        id = await runs.files.begin("t", "lines", "batch")
        await runs.files.append(id, 0, file_of(line("a"), line("b")).read())
        await runs.files.end(id, 4e9)
        batch = BatchObject(
            id="batch_a",
            endpoint="/v1/chat/completions",
            input_file_id=id,
            completion_window="1m",
            created_at=0,
            expires_at=60,
        )
        await runs.batches.begin("t", batch)
        keeping = asyncio.create_task(runs.keep(metrics.store))
        found = None
        while found is None or not found.status.has_ended:
            await asyncio.sleep(0.01)
            found = await runs.batches.get("batch_a", "t")
        keeping.cancel()
        assert found.error_file_id is not None
        text = b"".join([part async for part in runs.files.parts(found.error_file_id)])
        assert [json.loads(each)["error"]["code"] for each in text.splitlines()] == ["batch_expired"] * 2
        assert found.status is BatchState.EXPIRED
        return found

    mesh, database = FakeMesh(served, saying([])), database_of(endpoint_place)
    metrics = Metrics(mesh)
    asyncio.run(run(mesh, batch_runs(database, mesh, HttpConfig(), metrics, {})))
    assert not mesh.prompts
    database.close()


def test_a_router_that_was_taken_for_dead_answers_no_line_of_the_new_owner(place: Path | str) -> None:
    from router.batches.batch_store import BatchStore, BatchTaken
    from router.batches.lines import LineAnswer
    from router.batches.objects import BatchObject

    lost, owner = database_of(place), database_of(place)
    old, new = BatchStore(lost), BatchStore(owner)
    batch = BatchObject(
        id="batch_a", endpoint="/v1/completions", input_file_id="file-a", completion_window="1h", created_at=0, expires_at=9
    )  # fmt: skip

    async def run() -> None:
        await old.begin("t", batch)
        await old.answer("batch_a", 0, LineAnswer(False, b"0"))
        lost.seem_dead()
        assert await new.claim("batch_a")
        with pytest.raises(BatchTaken):
            await old.answer("batch_a", 1, LineAnswer(False, b"late"))
        with pytest.raises(BatchTaken):
            await old.advance("batch_a", lambda each: None, ended=4e9)
        await new.answer("batch_a", 1, LineAnswer(False, b"1"))
        assert [each async for each in new.answers("batch_a", errors=False)] == [b"0", b"1"]
        await old.change("batch_a", lambda each: None)  # a client's wish, at any router

    asyncio.run(run())
    lost.close()
    owner.close()


@pytest.mark.parametrize("trouble", ["full", "locked"])
def test_a_store_that_fails_delays_a_batch_and_costs_it_nothing(
    served: ServedModel,
    tokenizer: Tokenizer,
    tmp_path: Path,
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("router.batches.batch_runs.FULL_SECONDS", 0.05)
    mesh = FakeMesh(served, saying(ids_of(tokenizer, TEXT), FinishReason.STOP))
    mesh.delay = 0.02
    database, other = database_of(tmp_path / "answers"), sqlite3.connect(tmp_path / "answers")

    async def set_to(pragma: str) -> None:
        await database.run(lambda session: session.execute(f"PRAGMA {pragma}").fetchall() and None)

    with (
        serving(mesh, HttpConfig(batch_lines_per_instance=2), AnswerStore(database)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        batch = begun(client, *(line(f"{number}", user="x" * 3000) for number in range(12)))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2)
        if trouble == "full":
            asyncio.run(set_to("max_page_count = 1"))
        else:
            asyncio.run(set_to("busy_timeout = 10"))
            other.execute("BEGIN IMMEDIATE")
        until(lambda: f"batch {batch.id} waits" in caplog.text)
        assert ("full" if trouble == "full" else "locked") in caplog.text
        if trouble == "full":
            asyncio.run(set_to("max_page_count = 100000"))
        else:
            other.rollback()
        done = ended(client, batch.id)
        answers = read(client, done.output_file_id)
        assert [each["custom_id"] for each in answers] == [str(number) for number in range(12)]
        assert (done.status, done.error_file_id) == ("completed", None)
    other.close()
    database.close()
