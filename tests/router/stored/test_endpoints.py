"""Stored, background and resumable answers as clients see them: a real server, a scripted mesh."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import httpx2
import msgspec
import openai
import pytest

from engine.messages import Delta, FinishReason
from router.config import HttpConfig
from router.mesh import MeshError, Prompt, ServedModel
from router.stored import journal, runs
from router.stored.database import StoreDatabase
from router.stored.store import AnswerState, AnswerStore, key_of
from router.text import text_models
from router.text.text_model import TextModel, load_text_model
from router.text.tokens import Tokenizer
from tests.router.conftest import Server, ids_of, serving
from tests.router.fake_mesh import FakeMesh, saying
from tests.waiting import until

TEXT = " Hello world!"
SAID = " Hello world"
"""The text without its last token, which ends it."""
KEYS = ("one", "two")


clients: list[openai.OpenAI] = []


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    yield
    while clients:
        clients.pop().close()


@pytest.fixture
def stored(served: ServedModel, tokenizer: Tokenizer, endpoint_place: Path | str) -> Iterator[Server]:
    store = AnswerStore(StoreDatabase(endpoint_place, most_bytes=1 << 20, lasts=False))
    config = HttpConfig(api_key=KEYS, override_generation_config='{"temperature": 0.5, "top_p": 0.25}')
    with serving(
        FakeMesh(served, saying(ids_of(tokenizer, TEXT), FinishReason.STOP)), config, store
    ) as server:
        yield server
    store.database.close()


def client_of(server: Server, key: str = "one") -> openai.OpenAI:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)
    clients.append(client)
    return client


def get(server: Server, path: str, key: str = "one", **headers: str) -> httpx2.Response:
    return server.client.get(path, headers={"authorization": f"Bearer {key}", **headers})


def two_stores(place: Path | str) -> tuple[AnswerStore, AnswerStore]:
    """Those of two routers, which share one database."""
    one, other = (AnswerStore(StoreDatabase(place, most_bytes=1 << 20, lasts=False)) for _ in range(2))
    return one, other


def two_meshes(served: ServedModel, tokenizer: Tokenizer) -> tuple[FakeMesh, FakeMesh]:
    """As two routers see it; both say :data:`TEXT`."""
    one, other = (FakeMesh(served, saying(ids_of(tokenizer, TEXT), FinishReason.STOP)) for _ in range(2))
    return one, other


def test_a_stored_response_is_there_for_its_key_until_deleted(stored: Server) -> None:
    client = client_of(stored)
    made = client.responses.create(model="tiny", input="Hello", store=True)
    assert made.model_extra is not None
    assert (made.output_text, made.model_extra["store"]) == (SAID, True)
    assert client.responses.retrieve(made.id) == made
    with pytest.raises(openai.NotFoundError) as foreign:
        client_of(stored, "two").responses.retrieve(made.id)
    items = client.responses.input_items.list(made.id)
    assert [(each.role, each.content[0].text) for each in items] == [("user", "Hello")]  # type: ignore[union-attr]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as deleted:
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.retrieve("resp_nobody")
    assert foreign.value.message == deleted.value.message == unknown.value.message


def test_a_stream_can_be_read_again_behind_any_event(stored: Server) -> None:
    client = client_of(stored)
    events = list(client.responses.create(model="tiny", input="Hello", store=True, stream=True))
    id = events[0].response.id  # type: ignore[union-attr]
    for after in (0, 3, len(events) - 1):
        again = list(client.responses.retrieve(id, stream=True, starting_after=after))
        assert again == events[after + 1 :]
    with pytest.raises(openai.BadRequestError, match="there is nothing after"):
        client.responses.retrieve(id, stream=True, starting_after=len(events) + 5)


def test_a_response_continues_another(stored: Server) -> None:
    client = client_of(stored)
    first = client.responses.create(model="tiny", input="Hello", store=True)
    second = client.responses.create(model="tiny", input="again", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    whole = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "again"},
    ]
    client.responses.create(model="tiny", input=whole)  # type: ignore[arg-type]
    *_, continued, spelled_out = stored.mesh.prompts
    assert continued.prompt_ids == spelled_out.prompt_ids
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="again", previous_response_id="resp_nobody")


def test_a_conversation_gets_what_is_asked_and_answered_in_it(stored: Server) -> None:
    client = client_of(stored)
    made = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "Hello"}], metadata={"topic": "tests"}
    )
    first = client.responses.create(model="tiny", input="again", conversation=made.id)
    assert first.conversation is not None
    assert (first.conversation.id, first.output_text) == (made.id, SAID)
    stream = client.responses.create(model="tiny", input="more", conversation=made.id, stream=True)
    assert list(stream)[-1].type == "response.completed"
    items = list(client.conversations.items.list(made.id, order="asc"))
    assert [(each.role, each.content[0].text) for each in items] == [  # type: ignore[union-attr]
        ("user", "Hello"), ("user", "again"), ("assistant", SAID), ("user", "more"), ("assistant", SAID)
    ]  # fmt: skip
    whole = [
        {"role": "user", "content": "Hello"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": "more"},
    ]
    client.responses.create(model="tiny", input=whole)  # type: ignore[arg-type]
    *_, continued, spelled_out = stored.mesh.prompts
    assert continued.prompt_ids == spelled_out.prompt_ids
    (added,) = client.conversations.items.create(made.id, items=[{"role": "user", "content": "last"}]).data
    assert client.conversations.items.retrieve(str(added.id), conversation_id=made.id) == added
    client.conversations.items.delete(str(added.id), conversation_id=made.id)
    assert len(list(client.conversations.items.list(made.id))) == 5
    assert client.conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    with pytest.raises(openai.BadRequestError, match="not both"):
        client.responses.create(model="tiny", input="x", conversation=made.id, previous_response_id=first.id)
    foreign = client_of(stored, "two")
    for call in (
        lambda: foreign.conversations.retrieve(made.id),
        lambda: foreign.conversations.delete(made.id),
        lambda: foreign.conversations.items.list(made.id),
        lambda: foreign.responses.create(model="tiny", input="x", conversation=made.id),
        lambda: client.conversations.items.retrieve("msg_nobody", conversation_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_errors_name_the_items_that_the_client_sent(stored: Server) -> None:
    """This model takes no images."""
    client = client_of(stored)
    first = client.responses.create(model="tiny", input="Hello", store=True)
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    bad: Any = [{"role": "user", "content": "More"}, {"role": "user", "content": [picture]}]
    made = client.conversations.create(items=[{"type": "message", "role": "user", "content": "Hello"}])
    calls: list[dict[str, Any]] = [
        {},
        {"previous_response_id": first.id},
        {"previous_response_id": first.id, "store": True},
        {"conversation": made.id},
    ]
    for call in calls:
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]\.content\[0\]") as refused:
            client.responses.create(model="tiny", input=bad, **call)
        assert refused.value.param == "input[1].content[0]", call
    client.conversations.items.create(made.id, items=bad[1:])
    with pytest.raises(openai.BadRequestError, match="conversation") as refused:
        client.responses.create(model="tiny", input="Well?", conversation=made.id)
    assert refused.value.param == "conversation[1].content[0]"


def test_a_response_in_the_background_is_polled_and_cancelled(stored: Server) -> None:
    client = client_of(stored)
    stored.mesh.delay = 0.2
    slow = client.responses.create(model="tiny", input="Hello", background=True)
    assert slow.status == "queued"
    assert client.responses.retrieve(slow.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="is running, not done"):
        client.responses.create(model="tiny", input="again", previous_response_id=slow.id)
    for _ in range(2):
        assert client.responses.cancel(slow.id).status == "cancelled"
    stored.wait_until_idle()
    stored.mesh.delay = 0.0
    done = client.responses.create(input="Hello", background=True)
    until(lambda: client.responses.retrieve(done.id).status == "completed")
    for one in (slow, client.responses.retrieve(slow.id), done, client.responses.retrieve(done.id)):
        assert (one.model, one.temperature, one.top_p) == ("tiny", 0.5, 0.25), one.status
    assert client.responses.retrieve(done.id).output_text == SAID
    assert client.responses.cancel(done.id).status == "completed"
    stored_one = client.responses.create(model="tiny", input="Hello", store=True)
    with pytest.raises(openai.BadRequestError, match="background: true"):
        client.responses.cancel(stored_one.id)


@pytest.mark.parametrize("api", ["chat/completions", "completions", "messages"])
def test_a_resumable_stream_goes_on_behind_any_event_for_all_readers(stored: Server, api: str) -> None:
    stored.mesh.delay = 0.02
    body = {"model": "tiny", "stream": True, "max_tokens": 8}
    body |= (
        {"prompt": "Hello"} if api == "completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    )
    headers = {"authorization": "Bearer one", "x-lockstep-resumable": "1", "x-request-id": "mine"}
    url = f"/v1/{api}"
    with stored.client.stream("POST", url, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        next(answer.iter_bytes())  # and goes away
    id = {"chat/completions": "chatcmpl-mine", "completions": "cmpl-mine", "messages": "msg_mine"}[api]
    found: list[bytes] = []
    readers = [
        threading.Thread(target=lambda: found.append(get(stored, f"/v1/streams/{id}").content))
        for _ in range(3)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found[0] == found[1] == found[2]
    events = [each + b"\n\n" for each in found[0].split(b"\n\n")[:-1]]
    assert [each.splitlines()[0] for each in events] == [
        f"id: {id}-{number}".encode() for number in range(len(events))
    ]
    for count in (1, len(events) - 1):
        rest = get(stored, f"/v1/streams/{id}", **{"last-event-id": f"{id}-{count - 1}"})
        assert rest.content == b"".join(events[count:])
    assert get(stored, f"/v1/streams/{id}?after={len(events) + 9}").status_code == 400
    assert get(stored, f"/v1/streams/{id}?after=x").status_code == 400
    assert get(stored, f"/v1/streams/{id}", "two").status_code == 404
    again = stored.client.post(url, json=body, headers=headers)
    assert (again.status_code, "another request id" in again.text) == (409, True)


def test_an_id_may_have_slashes_and_belong_to_two_keys(stored: Server) -> None:
    body = {"model": "tiny", "stream": True, "max_tokens": 8, "prompt": "Hello"}
    found = []
    for key in KEYS:
        headers = {"authorization": f"Bearer {key}", "x-lockstep-resumable": "1", "x-request-id": "a/b"}
        posted = stored.client.post("/v1/completions", json=body, headers=headers)
        assert posted.status_code == 200
        found.append((posted.content, get(stored, "/v1/streams/cmpl-a/b", key).content))
    assert [again for _, again in found] == [first for first, _ in found]
    client = client_of(stored)
    made = client.responses.create(
        model="tiny", input="Hello", store=True, extra_headers={"x-request-id": "c/d"}
    )
    assert client.responses.retrieve(made.id) == made
    assert client.responses.input_items.list(made.id).data
    page = stored.client.get("/metrics").text
    assert 'lockstep:store_events_total{event="answer_done"} 3.0' in page
    until(lambda: "lockstep:store_bytes" in stored.client.get("/metrics").text)


def test_an_answer_whose_key_is_gone_goes_on_and_is_counted_once(
    served: ServedModel, tokenizer: Tokenizer, endpoint_place: Path | str
) -> None:
    def database() -> StoreDatabase:
        return StoreDatabase(endpoint_place, most_bytes=1 << 20, lasts=False)

    def mesh() -> FakeMesh:
        return FakeMesh(served, saying(ids_of(tokenizer, TEXT), FinishReason.STOP))

    before, slow = AnswerStore(database()), mesh()
    slow.delay = 30.0
    with serving(slow, HttpConfig(api_key=KEYS, max_concurrent_requests=1), before) as first:
        begun = client_of(first, "two").responses.create(model="tiny", input="Hello", background=True)
        before.database.close()  # as at its death
        after = AnswerStore(database())
        config = HttpConfig(api_key=("one",), max_concurrent_requests=1)
        with serving(mesh(), config, after) as second:
            done = 'lockstep:store_events_total{event="answer_done"} 1.0'
            until(lambda: done in second.client.get("/metrics").text)
            assert sum(second.metrics.success.values()) == 1
            assert second.metrics.requests.ttft.totals() == {}, "nobody's time"
        tenant = hashlib.sha256(b"lockstep tenant two").hexdigest()[:32]
        row = asyncio.run(after.get(key_of(tenant, begun.id)))
        assert row is not None
        assert row.state is AnswerState.DONE
        after.database.close()


def test_a_router_that_was_taken_for_dead_leaves_its_stream_to_the_new_owner(
    served: ServedModel, tokenizer: Tokenizer, place: Path | str
) -> None:
    lost, owner = (AnswerStore(StoreDatabase(place, most_bytes=1 << 20, lasts=False)) for _ in range(2))

    def script(prompt: Prompt) -> list[Delta]:
        known = len(prompt.known.token_ids) if prompt.known else 0
        return list(saying(ids_of(tokenizer, TEXT), FinishReason.STOP)(prompt))[known:]

    slow, quick = (FakeMesh(served, script) for _ in range(2))
    slow.delay = 0.7
    headers = {"x-lockstep-resumable": "1", "x-request-id": "mine"}
    body = {"model": "tiny", "prompt": "Hello", "stream": True}
    with serving(slow, HttpConfig(), lost) as first, serving(quick, HttpConfig(), owner) as second:
        seen = b""
        with (
            first.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
            contextlib.suppress(httpx2.RemoteProtocolError),
        ):
            for part in answer.iter_bytes():
                if not seen:
                    lost.database.seem_dead()
                seen += part
        assert b"[DONE]" not in seen, "its connection broke"
        whole = second.client.get("/v1/streams/cmpl-mine").content
        assert whole.startswith(seen)
        assert whole.endswith(b"data: [DONE]\n\n")
        assert first.client.get("/v1/streams/cmpl-mine").content == whole
        first.wait_until_idle()
    for store in (lost, owner):
        store.database.close()


def test_a_begun_answer_that_no_instance_takes_for_a_while_goes_on_later(
    served: ServedModel, tokenizer: Tokenizer, endpoint_place: Path | str
) -> None:
    """Its recorded tokens have begun its stream, so that an error would end it."""
    lost, owner = two_stores(endpoint_place)
    slow, fresh = two_meshes(served, tokenizer)
    slow.delay = 0.7
    fresh.refusal = MeshError(503, "ServiceUnavailableError", "no instance is ready")
    headers = {"x-lockstep-resumable": "1", "x-request-id": "mine"}
    body = {"model": "tiny", "prompt": "Hello", "stream": True}
    with serving(slow, HttpConfig(), lost) as first, serving(fresh, HttpConfig(), owner) as second:
        seen = b""
        with (
            first.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
            contextlib.suppress(httpx2.RemoteProtocolError),
        ):
            for part in answer.iter_bytes():
                if not seen:
                    lost.database.seem_dead()
                seen += part
        found: list[bytes] = []
        reader = threading.Thread(
            target=lambda: found.append(second.client.get("/v1/streams/cmpl-mine", timeout=60.0).content)
        )
        reader.start()
        reader.join(2.0)  # some tries
        assert not found
        fresh.refusal = None
        reader.join()
        assert found[0].startswith(seen)
        assert found[0].endswith(b"data: [DONE]\n\n")
        assert b"error" not in found[0]
        first.wait_until_idle()
    for store in (lost, owner):
        store.database.close()


def test_a_router_that_knows_no_model_yet_ends_no_answer_of_a_dead_one(
    served: ServedModel, tokenizer: Tokenizer, endpoint_place: Path | str
) -> None:
    """A whole mesh starts again, and clients come back before its instances."""
    before, after = two_stores(endpoint_place)
    model = msgspec.structs.replace(served, fingerprint="a digest")
    slow, fresh = (FakeMesh(model, saying(ids_of(tokenizer, TEXT), FinishReason.STOP)) for _ in range(2))
    slow.delay = 30.0
    config = HttpConfig(api_key=KEYS)
    with serving(slow, config, before) as first, serving(fresh, config, after) as second:
        begun = client_of(first).responses.create(model="tiny", input="Hello", background=True)
        before.database.close()  # as at its death
        fresh.model = None
        found: list[bytes] = []
        path = f"/v1/responses/{begun.id}?stream=true"
        key = {"authorization": "Bearer one"}
        reader = threading.Thread(
            target=lambda: found.append(second.client.get(path, headers=key, timeout=60.0).content)
        )
        reader.start()
        reader.join(1.5)
        assert not found, "nobody can know yet whether the model is another one"
        fresh.model = model
        reader.join(60.0)
        assert b"event: response.completed" in found[0], found
    after.database.close()


def test_a_reader_at_a_router_whose_store_fails_is_cut_off_and_not_forgotten(
    served: ServedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """It reads what another router makes, so it can go on there."""
    maker, reader = (
        AnswerStore(StoreDatabase(tmp_path / "store", most_bytes=1 << 20, lasts=False)) for _ in range(2)
    )
    slow, other = two_meshes(served, tokenizer)
    slow.delay = 5.0
    headers = {"authorization": "Bearer one"}
    config = HttpConfig(api_key=KEYS)
    with serving(slow, config, maker) as first, serving(other, config, reader) as second:
        begun = client_of(first).responses.create(model="tiny", input="Hello", background=True)
        path = f"/v1/responses/{begun.id}?stream=true"
        with (
            second.client.stream("GET", path, headers=headers, timeout=30.0) as answer,
            contextlib.suppress(httpx2.RemoteProtocolError),
        ):
            seen = b""
            for part in answer.iter_bytes():
                if not seen:
                    with sqlite3.connect(tmp_path / "store") as connection:
                        connection.execute("ALTER TABLE answers RENAME TO lost")
                    connection.close()
                seen += part
        assert seen, "its first token had come"
        assert b"response.completed" not in seen
    for store in (maker, reader):
        store.database.close()


def test_an_answer_that_a_later_router_refuses_ends_with_its_reason(
    served: ServedModel, tokenizer: Tokenizer, endpoint_place: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mesh that starts again may lack an adapter, or name its model otherwise."""
    monkeypatch.setattr(runs, "REFUSED_SECONDS", 1.0)
    before, after = two_stores(endpoint_place)
    slow, fresh = two_meshes(served, tokenizer)
    slow.delay = 30.0
    fresh.model = msgspec.structs.replace(served, names=("another",))
    config = HttpConfig(api_key=KEYS)
    with serving(slow, config, before) as first, serving(fresh, config, after) as second:
        begun = client_of(first).responses.create(model="tiny", input="Hello", background=True)
        before.database.close()  # as at its death
        path = f"/v1/responses/{begun.id}"
        until(lambda: get(second, path).json()["status"] == "failed")
        assert "`tiny` does not exist" in get(second, path).text
    after.database.close()


@pytest.mark.parametrize(("is_final", "num_lost", "tries"), [(True, 8, 1), (False, 3, 3)])
def test_an_answer_that_ends_the_instances_of_a_later_router_is_tried_no_further(
    served: ServedModel,
    tokenizer: Tokenizer,
    endpoint_place: Path | str,
    monkeypatch: pytest.MonkeyPatch,
    is_final: bool,
    num_lost: int,
    tries: int,
) -> None:
    for module in (journal, runs):
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    before, after = two_stores(endpoint_place)
    slow, fresh = two_meshes(served, tokenizer)
    slow.delay = 30.0
    found = 0

    def end(_: Prompt) -> NoReturn:
        nonlocal found
        found += 1
        error = MeshError(503, "ServiceUnavailableError", "it ends instances", is_final=is_final)
        error.num_lost = num_lost
        raise error

    fresh.script = end
    config = HttpConfig(api_key=KEYS)
    with serving(slow, config, before) as first, serving(fresh, config, after) as second:
        begun = client_of(first).responses.create(model="tiny", input="Hello", background=True)
        before.database.close()  # as at its death
        path = f"/v1/responses/{begun.id}"
        until(lambda: get(second, path).json()["status"] == "failed")
        assert "it ends instances" in get(second, path).text
        assert found == tries
        taken_over = 'lockstep:store_events_total{event="answer_taken_over"} 1.0'
        assert taken_over in second.client.get("/metrics").text
    after.database.close()


def test_time_for_adapters_begins_when_there_is_a_model(
    served: ServedModel, tokenizer: Tokenizer, endpoint_place: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mesh that starts again first has no model, then not yet all its adapters."""
    monkeypatch.setattr(runs, "REFUSED_SECONDS", 2.0)
    before, after = two_stores(endpoint_place)
    slow, fresh = two_meshes(served, tokenizer)
    slow.delay = 30.0
    fresh.model = None
    config = HttpConfig(api_key=KEYS)
    with serving(slow, config, before) as first, serving(fresh, config, after) as second:
        begun = client_of(first).responses.create(model="tiny", input="Hello", background=True)
        before.database.close()  # as at its death
        path = f"/v1/responses/{begun.id}"
        reader = threading.Thread(target=lambda: get(second, f"{path}?stream=true"))
        reader.start()  # which makes its run known here
        reader.join(2.5)
        fresh.model = msgspec.structs.replace(served, names=("another",))
        reader.join(1.0)
        assert get(second, path).json()["status"] == "in_progress"
        fresh.model = served
        until(lambda: get(second, path).json()["status"] == "completed")
        reader.join(20.0)
    after.database.close()


def test_a_router_that_refuses_what_a_living_one_makes_looks_seldom(
    served: ServedModel, tokenizer: Tokenizer, place: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = two_stores(place)
    slow, strange = two_meshes(served, tokenizer)
    slow.delay = 0.5
    strange.model = msgspec.structs.replace(served, fingerprint="another")
    remade, tries = runs.Runs._remade, 0

    async def counted(*terms: Any) -> None:
        nonlocal tries
        tries += 1
        await remade(*terms)

    monkeypatch.setattr(runs.Runs, "_remade", counted)
    with serving(slow, HttpConfig(), owner) as first, serving(strange, HttpConfig(), other) as second:
        begun = client_of(first).responses.create(model="tiny", input="Hello", background=True)
        began_at = time.monotonic()
        events = get(second, f"/v1/responses/{begun.id}?stream=true").text
        assert "event: response.completed" in events
        most = 2 + (time.monotonic() - began_at) / journal.RETRY_SECONDS
        assert 1 <= tries <= most, "each reads all tokens and makes their text again"
    for store in (owner, other):
        store.database.close()


def test_a_response_is_cancelled_at_a_router_that_has_not_loaded_its_tokenizer(
    served: ServedModel, tokenizer: Tokenizer, endpoint_place: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = two_stores(endpoint_place)
    slow, fresh = two_meshes(served, tokenizer)
    slow.delay = 30.0
    config = HttpConfig(api_key=KEYS, override_generation_config='{"temperature": 0.5, "top_p": 0.25}')
    may_load = threading.Event()

    def load(*terms: Any) -> TextModel:
        may_load.wait()
        return load_text_model(*terms)

    with serving(slow, config, owner) as first, serving(fresh, config, other) as second:
        begun = client_of(first).responses.create(model="tiny", input="Hello", background=True)
        monkeypatch.setattr(text_models, "load_text_model", load)
        try:
            responses = client_of(second).with_options(timeout=10.0).responses
            found = [responses.retrieve(begun.id), responses.cancel(begun.id)]
        finally:
            may_load.set()
        assert [each.status for each in found] == ["in_progress", "cancelled"]
        assert {(each.model, each.temperature, each.top_p) for each in found} == {("tiny", 0.5, 0.25)}
        first.wait_until_idle()
    for store in (owner, other):
        store.database.close()


def test_a_refused_request_is_not_stored(stored: Server) -> None:
    client = client_of(stored)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(
            model="tiny", input="Hello", store=True, temperature=-1, extra_headers={"x-request-id": "bad"}
        )
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_bad")
    wrong = stored.client.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": "Hello", "stream": True},
        headers={"authorization": "Bearer one", "x-lockstep-resumable": "yes"},
    )
    assert (wrong.status_code, "X-Lockstep-Resumable" in wrong.text) == (400, True)


def test_a_full_store_costs_background_responses_only(
    served: ServedModel, tokenizer: Tokenizer, endpoint_place: Path | str
) -> None:
    store = AnswerStore(StoreDatabase(endpoint_place, most_bytes=1, lasts=False))
    with serving(
        FakeMesh(served, saying(ids_of(tokenizer, TEXT), FinishReason.STOP)), HttpConfig(), store
    ) as server:
        client = client_of(server)
        made = client.responses.create(model="tiny", input="Hello", store=True)
        assert made.model_extra is not None
        assert (made.output_text, made.model_extra["store"]) == (SAID, False)
        with pytest.raises(openai.InternalServerError, match="full or does not work"):
            client.responses.create(model="tiny", input="Hello", background=True)
    store.database.close()


def test_a_store_that_fails_is_named_by_each_endpoint(
    served: ServedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    place = tmp_path / "store"
    store = AnswerStore(StoreDatabase(place, most_bytes=1 << 20, lasts=False))
    mesh = FakeMesh(served, saying(ids_of(tokenizer, TEXT), FinishReason.STOP))
    with serving(mesh, HttpConfig(), store) as server:
        made = client_of(server).responses.create(model="tiny", input="Hello", background=True)
        until(lambda: get(server, f"/v1/responses/{made.id}").json()["status"] == "completed")
        with sqlite3.connect(place) as connection:
            connection.execute("ALTER TABLE answers RENAME TO lost")
        connection.close()
        for method, path in (
            ("GET", f"/v1/responses/{made.id}"),
            ("GET", f"/v1/responses/{made.id}?stream=true"),
            ("DELETE", f"/v1/responses/{made.id}"),
            ("POST", f"/v1/responses/{made.id}/cancel"),
            ("GET", f"/v1/responses/{made.id}/input_items"),
            ("GET", f"/v1/streams/{made.id}"),
        ):
            answer = server.client.request(method, path)
            assert (answer.status_code, "does not work" in answer.text) == (503, True), (method, path)
        again = {"model": "tiny", "input": "Hello", "previous_response_id": made.id}
        assert server.post("/v1/responses", again).status_code == 503
    store.database.close()
