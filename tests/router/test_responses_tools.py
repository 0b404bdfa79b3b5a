"""Tools and items of /v1/responses that chat lacks, as clients for OpenAI's server send them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from engine.messages import FinishReason
from router.api.responses.custom_input import InputReader, custom_arguments, custom_input
from router.mesh import ServedModel
from tests.router.conftest import Server
from tests.router.talking import TOOL_FLAGS, Speaker, openai_client, speaker, talking

SPAWN: dict[str, Any] = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents",
    "tools": [SPAWN, {"type": "custom", "name": "note"}],
}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Change files",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
TOOLS: list[Any] = [WEATHER, NAMESPACE, PATCH, {"type": "web_search", "external_web_access": False}]
CALLS = (
    '<tool_call>\n{"name": "agents__spawn", "arguments": {"message": "go"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "patch", "arguments": {"input": "a \\"b\\"\\n"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "agents__note", "arguments": {"input": "c"}}\n</tool_call>'
)
LEFT_OUT = "x-lockstep-left-out"


@pytest.fixture(scope="module")
def talking_server(served: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with talking(served, tmp_path_factory.mktemp("responses_tools"), **TOOL_FLAGS) as server:
        yield server


client = openai_client
say = speaker


def shown_tools(prompt: str) -> list[Any]:
    """The functions that a prompt offers."""
    text = prompt.removeprefix("TOOLS").partition("<user>")[0]
    return [tool["function"] for tool in msgspec.json.decode(text)]


def test_the_model_is_offered_functions(client: openai.OpenAI, say: Speaker) -> None:
    say("x")
    answer = client.responses.with_raw_response.create(model="tiny", input="Hello", tools=TOOLS)
    weather, spawn, note, patch = shown_tools(say.last_prompt)
    names = [tool["name"] for tool in (weather, spawn, note, patch)]
    assert names == ["weather", "agents__spawn", "agents__note", "patch"]
    assert patch["parameters"]["required"] == ["input"]
    assert patch["description"] == ('Change files\n\nThe input follows this grammar (lark):\nstart: "x"')
    assert answer.headers[LEFT_OUT] == "web_search"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_under_the_names_of_the_client(client: openai.OpenAI, say: Speaker, stream: bool) -> None:
    say(CALLS)
    answer: Any = client.responses.create(model="tiny", input="Hello", tools=TOOLS, stream=stream)
    events: list[Any] = []
    if stream:
        events = list(answer)
        answer = events[-1].response
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.model_dump() for item in done] == [item.model_dump() for item in answer.output]
    spawn, patch, note = answer.output
    assert (spawn.type, spawn.namespace, spawn.name) == ("function_call", "agents", "spawn")
    assert spawn.arguments == '{"message": "go"}'
    assert (patch.type, patch.namespace, patch.name, patch.input) == (
        "custom_tool_call", None, "patch", 'a "b"\n',
    )  # fmt: skip
    assert (note.type, note.namespace, note.name, note.input) == ("custom_tool_call", "agents", "note", "c")
    assert [item.id.partition("_")[0] for item in answer.output] == ["fc", "ctc", "ctc"]
    if stream:
        added, *deltas, input_done, _ = [event for event in events if getattr(event, "output_index", 0) == 1]
        assert (added.item.input, input_done.input) == ("", patch.input)
        assert {event.type for event in deltas} == {"response.custom_tool_call_input.delta"}
        assert "".join(event.delta for event in deltas) == patch.input
        assert len(deltas) > 2, "as it comes"


def test_a_function_has_no_namespace_where_the_client_gave_none(say: Speaker) -> None:
    say('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    (call,) = say.server.post("/v1/responses", {"input": "x", "tools": TOOLS}).json()["output"]
    assert "namespace" not in call


def test_a_custom_call_that_was_cut_keeps_its_text(client: openai.OpenAI, say: Speaker) -> None:
    say('<tool_call>\n{"name": "patch", "arguments": {"input": "abc', FinishReason.LENGTH)
    answer = client.responses.create(model="tiny", input="Hello", tools=TOOLS)
    (call,) = answer.output
    assert call.type == "custom_tool_call"
    assert (call.input, answer.status) == ("abc", "incomplete")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a \\"b\\"\\n\\\\ \\/"}', 'a "b"\n\\ /'),
        (' {\n "input" : "\\u00fc\\ud83d\\ude42x🙂"} ', "ü🙂x🙂"),
        ('{"input": ""}', ""),
        ('{"input": "a\nb", "more": 1}', "a\nb"),
        ('{"input": "a\\u00', "a\\u00"),
        ('{"input": "a\\x and so on, long"}', "a\\x and so on, long"),
        ('{"input": "\\ud83d alone for a while"}', "\\ud83d alone for a while"),
        ('{"more": 1, "input": "b"}', "b"),
        ('{"input": 5}', '{"input": 5}'),
        ('["b"]', '["b"]'),
        ("just text", "just text"),
        ("", ""),
    ],
)
def test_the_text_of_a_custom_call(arguments: str, text: str, size: int) -> None:
    reader = InputReader()
    parts = [reader.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)]
    assert "".join(parts) + reader.end() == custom_input(arguments) == text


@pytest.mark.parametrize("text", ["", "a", 'x"\\\n\t\x07', "🙂", "*** Begin Patch\n+ü\n"])
def test_a_text_comes_back_from_its_arguments(text: str) -> None:
    assert custom_input(custom_arguments(text)) == text


def test_calls_and_results_come_back(client: openai.OpenAI, say: Speaker) -> None:
    say(CALLS)
    first = client.responses.create(model="tiny", input="Hello", tools=TOOLS)
    spawn, patch, note = first.output
    assert spawn.type == "function_call"
    assert patch.type == note.type == "custom_tool_call"
    history: list[Any] = [
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": spawn.call_id, "output": "up"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
        {"type": "custom_tool_call_output", "call_id": note.call_id, "output": [{"type": "input_text", "text": "n"}]},
    ]  # fmt: skip
    client.responses.create(model="tiny", input=history)
    assert say.last_prompt == (
        "<assistant>CALL agents__spawn:CALL patch:CALL agents__note:"
        f"<tool>up[{spawn.call_id}]<tool>done[{patch.call_id}]<tool>n[{note.call_id}]"
    )


def test_items_of_tools_that_ran_elsewhere_are_taken(say: Speaker) -> None:
    items: list[Any] = [
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}], "content": None},
        {"type": "local_shell_call", "call_id": "c1", "action": {"city": "Ulm"}, "status": "completed"},
        {"type": "local_shell_call_output", "id": "c1", "output": "b"},
        {"type": "mcp_call", "id": "m1", "name": "find", "server_label": "s",
         "arguments": '{"city": "Bath"}', "output": "c"},
        {"type": "message", "role": "assistant", "content": [], "status": "completed"},
        {"role": "user", "content": "d"},
    ]  # fmt: skip
    say("x")
    answer = say.server.post("/v1/responses", {"input": items})
    assert answer.status_code == 200, answer.text
    assert answer.headers[LEFT_OUT] == "compaction, web_search_call"
    assert say.last_prompt == (
        "<user>a<assistant>(why)CALL local_shell:Ulm<tool>b[c1]<assistant>CALL find:Bath<tool>c[m1]"
        "<assistant><user>d"
    )


def test_reasoning_that_cannot_be_read_is_left_out(say: Speaker) -> None:
    say("x")
    items: list[Any] = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        {"role": "user", "content": "b"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"role": "assistant", "content": "c"},
    ]
    answer = say.server.post("/v1/responses", {"input": items})
    assert answer.headers[LEFT_OUT] == "reasoning"
    assert say.last_prompt == "<user>a<user>b<assistant>c"


def test_what_is_left_out_is_logged(say: Speaker, caplog: pytest.LogCaptureFixture) -> None:
    say("x")
    with caplog.at_level("INFO", "router.api.generating"):
        body = {"input": "x", "tools": TOOLS}
        assert say.server.post("/v1/responses", body).status_code == 200
    assert "left out of the prompt, as no server runs them here: web_search" in caplog.text


def test_nothing_is_said_to_be_left_out_where_nothing_is(say: Speaker) -> None:
    say("x")
    assert LEFT_OUT not in say.server.post("/v1/responses", {"input": "x", "tools": [WEATHER]}).headers


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_tools_that_cannot_run_here_may_be_all_there_are(say: Speaker, choice: str | None) -> None:
    say("x")
    body = {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": choice, "stream": True}
    answer = say.server.post("/v1/responses", body)
    assert (answer.status_code, answer.headers[LEFT_OUT]) == (200, "web_search")
    assert say.last_prompt == "<user>x"


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "spawn"),
        ({"type": "custom", "name": "patch"}, "patch"),
    ],
)
def test_a_tool_can_be_chosen(say: Speaker, choice: Any, name: str) -> None:
    called = {"spawn": "agents__spawn"}.get(name, name)
    say(f'<tool_call>\n{{"name": "{called}", "arguments": {{"input": "x"}}}}\n</tool_call>')
    answer = say.server.post("/v1/responses", {"input": "x", "tools": TOOLS, "tool_choice": choice})
    assert [item["name"] for item in answer.json()["output"]] == [name]
    assert called in (say.server.mesh.prompts[-1].params.grammar or "")


SPAWN_CHOSEN = {"type": "function", "name": "spawn", "namespace": "agents"}


@pytest.mark.parametrize(
    ("named", "mode", "offered"),
    [
        ([SPAWN_CHOSEN], "auto", ["agents__spawn"]),
        ([{"type": "custom", "name": "patch"}, SPAWN_CHOSEN], "required", ["agents__spawn", "patch"]),
        ([SPAWN_CHOSEN, {"type": "web_search"}], "auto", ["agents__spawn"]),
    ],
)
def test_only_allowed_tools_are_offered(say: Speaker, named: Any, mode: str, offered: list[str]) -> None:
    say('<tool_call>\n{"name": "agents__spawn", "arguments": {"input": "x"}}\n</tool_call>')
    choice = {"type": "allowed_tools", "mode": mode, "tools": named}
    body = {"input": "x", "tools": TOOLS, "tool_choice": choice}
    answer = say.server.post("/v1/responses", body).json()
    assert [item["name"] for item in answer["output"]] == ["spawn"]
    counted = say.server.post("/v1/responses/input_tokens", body).json()
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]
    assert answer["tool_choice"] == choice
    shown = [name for name in ("weather", "agents__spawn", "patch") if f'"{name}"' in say.last_prompt]
    assert shown == offered
    assert (say.server.mesh.prompts[-1].params.grammar is not None) is (mode == "required")


def test_no_tool_is_left_where_none_that_is_allowed_can_run(say: Speaker) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    say(call)
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    answer = say.server.post("/v1/responses", {"input": "x", "tools": TOOLS, "tool_choice": choice}).json()
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert answer["output"][0]["content"][0]["text"] == call


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([WEATHER], {"type": "allowed_tools", "mode": "auto", "tools": [SPAWN_CHOSEN]}, "allowed tool 0 names no"),
        ([WEATHER], {"type": "allowed_tools", "mode": "auto", "tools": ["weather"]}, "needs a list of tools"),
        (
            [WEATHER, {"type": "mcp"}],
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]},
            "tool_choice allows mcp, which cannot run here",
        ),
        ([WEATHER, {"type": "web_search"}], "required", "tools[1] has type 'web_search', which cannot run here"),
        ([WEATHER, {"type": "mcp"}], {"type": "mcp"}, "tool_choice names mcp, which cannot run here"),
        ([{"type": "web_search"}], "required", "cannot run here"),
        ([{"type": "weather"}], "auto", "tools[0] has type 'weather'; supported are function, custom"),
        ([{"type": "namespace", "name": "a", "tools": [NAMESPACE]}], "auto", "tools[0].tools[0] has type"),
        ([{"type": "namespace", "name": "a"}], "auto", "tools[0].tools must be a list"),
        ([{"type": "namespace", "tools": []}], "auto", "tools[0].name must be a string"),
        ([{"type": "custom"}], "auto", "tools[0].name must be a string"),
        ([NAMESPACE, SPAWN | {"name": "agents__spawn"}], "auto", "two tools are called 'agents__spawn'"),
    ],
)  # fmt: skip
def test_what_is_refused(say: Speaker, tools: Any, choice: Any, message: str) -> None:
    say("x")
    answer = say.server.post("/v1/responses", {"input": "x", "tools": tools, "tool_choice": choice})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert say.server.mesh.generations == []


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
@pytest.mark.parametrize("content", ["Well, ", [{"type": "output_text", "text": "Well, "}]])
def test_an_unfinished_answer_is_continued(say: Speaker, status: str, content: Any) -> None:
    say("fine")
    begun = {"type": "message", "role": "assistant", "status": status, "content": content}
    items = [{"role": "user", "content": "a"}, begun]
    answer = say.server.post("/v1/responses", {"input": items}).json()
    assert say.server.mesh.prompts[-1].params.max_tokens
    assert say.last_prompt == "<user>a<assistant>Well, "
    assert answer["output"][0]["content"][0]["text"] == "fine"
    told = say.server.post("/v1/responses", {"input": [*items, {"role": "user", "content": "b"}]})
    assert told.status_code == 200
    assert say.last_prompt == "<user>a<assistant>Well, <user>b"


def test_unfinished_reasoning_is_not_continued(say: Speaker) -> None:
    item = {
        "type": "reasoning",
        "status": "in_progress",
        "content": [{"type": "reasoning_text", "text": "a"}],
    }
    answer = say.server.post("/v1/responses", {"input": [item]})
    assert answer.status_code == 400
    assert "input[0] is unfinished reasoning" in answer.json()["error"]["message"]
