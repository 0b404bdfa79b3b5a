"""Why requests were refused, in the log."""

from __future__ import annotations

import logging

import pytest

from engine.messages import Delta
from router.app.refusals import INTERVAL, MAX_LINES, Refusals
from router.config import HttpConfig
from router.errors import MAX_LOGGED, ApiError, in_terms_of
from router.mesh import MeshError, ServedModel
from router.text.chat_template import ChatTemplate, ChatTemplateError
from tests.router.conftest import Server, serving
from tests.router.fake_mesh import FakeMesh, saying


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "router.app.refusals")
    return caplog


def lines(log: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(each.levelname, each.getMessage()) for each in log.records if each.name == "router.app.refusals"]


def test_what_was_wrong(served: ServedModel, log: pytest.LogCaptureFixture) -> None:
    with serving(FakeMesh(served, saying([70])), HttpConfig()) as server:
        server.post("/v1/completions?key=secret", {"prompt": "a", "temperature": -1})
        server.client.get("/nothing")
        server.client.put("/v1/completions")
        server.client.get("/v1/models", headers={"host": "a.example"})
        server.mesh.refusal = MeshError(503, "ServiceUnavailableError", "all full", retry_after=2)
        server.post("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    found = lines(log)
    assert [level for level, _ in found] == ["INFO"] * 4 + ["WARNING"]
    bad, missing, method, host, full = (text for _, text in found)
    assert bad.startswith("POST /v1/completions: 400 (temperature): temperature must be a finite number")
    assert missing.startswith("GET /nothing: 404: This server has no /nothing.")
    assert method == "PUT /v1/completions: 405: PUT /v1/completions: Method Not Allowed."
    assert host.startswith("GET /v1/models: 421: Without --api-key")
    assert full == "POST /v1/messages: 503: all full"


def test_neither_keys_nor_prompts(served: ServedModel, log: pytest.LogCaptureFixture) -> None:
    with serving(FakeMesh(served, saying([70])), HttpConfig(api_key=("one",))) as server:
        server.client.get("/v1/models", headers={"authorization": "Bearer secret"})
        server.client.headers["authorization"] = "Bearer one"
        bad = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{secret"}}]}
        for body in ({"messages": [bad]}, {"messages": [{"role": "user", "content": "secret"}] * 2}):
            assert server.post("/v1/chat/completions", body | {"temperature": -1}).status_code == 400
    assert len(lines(log)) == 3
    assert "secret" not in str(lines(log))


def test_words_of_a_template(log: pytest.LogCaptureFixture) -> None:
    """It may quote messages in what it raises."""
    template = ChatTemplate("{{ raise_exception(messages[0].content) }}", {})
    with pytest.raises(ChatTemplateError, match="secret") as caught:
        template.render([{"role": "user", "content": "secret"}])
    error = ApiError(400, str(caught.value), param="messages", logged=caught.value.logged)
    Refusals().add("POST", "/v1/chat/completions", error)
    with pytest.raises(ApiError) as again, in_terms_of({"messages": "input"}):
        raise error
    assert again.value.logged == error.logged
    problem = "The chat template cannot render these messages."
    assert lines(log) == [("INFO", f"POST /v1/chat/completions: 400 (messages): {problem}")]


def test_an_error_of_ours(served: ServedModel, log: pytest.LogCaptureFixture) -> None:
    def script(_: object) -> list[Delta]:
        raise RuntimeError

    with serving(FakeMesh(served, script), HttpConfig()) as server:
        server.post("/v1/completions", {"prompt": "a"})
    assert lines(log) == [("ERROR", "POST /v1/completions: 500: Internal server error.")]


def test_what_goes_well_is_not_told(server: Server, log: pytest.LogCaptureFixture) -> None:
    server.post("/v1/completions", {"prompt": "a"})
    assert not lines(log)


def test_one_short_line(log: pytest.LogCaptureFixture) -> None:
    Refusals().add("GET", "/a\nb", ApiError(400, "é\r\n\x1b" + "a" * 1000, param="p\n"))
    ((_, text),) = lines(log)
    assert text.startswith("GET /a\\nb: 400 (p\\n): é\\r\\n\\x1baaa")
    assert len(text) < MAX_LOGGED + 50


def test_a_flood(log: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = Refusals(lambda: now)
    for _ in range(MAX_LINES + 7):
        refusals.add("GET", "/a", ApiError(404, "no"))
    assert len(lines(log)) == MAX_LINES
    refusals.add("GET", "/a", ApiError(500, "broken"))
    assert lines(log)[-1] == ("ERROR", "GET /a: 500: broken")
    now = INTERVAL
    refusals.add("GET", "/a", ApiError(404, "no"))
    assert [text for _, text in lines(log)[-2:]] == [
        "7 more requests were refused; only some are logged",
        "GET /a: 404: no",
    ]
