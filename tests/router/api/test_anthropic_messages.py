"""/v1/messages as the real Anthropic client sees it: a real server, a scripted mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.messages import FinishReason
from router.api.anthropic_messages.request import chat_request
from router.api.anthropic_messages.wire import MessagesRequest
from router.errors import ApiError
from router.mesh import MeshError, ServedModel
from router.text.tokens import Tokenizer, load_tokenizer
from tests.router.conftest import Server
from tests.router.fake_mesh import failing
from tests.router.talking import CALLS, SYSTEM_FIRST, THOUGHT, TOOL_FLAGS, Speaker, speaker, talking

if TYPE_CHECKING:  # it takes more than a second to load, which only processes that run these tests need
    import anthropic

USER: list[Any] = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {"name": "weather", "description": "Will it rain?", "input_schema": {"type": "object", "properties": {}}},
    {"name": "now", "input_schema": {"type": "object"}, "type": "custom"},
]


def system(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks)}


def addition(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": tool}


def removal(name: str) -> dict[str, Any]:
    return {"type": "tool_removal", "tool": by_name(name)}


def by_name(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "name": name}


BASIC: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": USER}


@pytest.fixture(scope="module")
def talking_server(served: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = TOOL_FLAGS | {"reasoning_parser": "qwen3"}
    with talking(served, tmp_path_factory.mktemp("messages"), **flags) as server:
        yield server


@pytest.fixture
def client(talking_server: Server) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=talking_server.url, api_key="none", max_retries=0) as client:
        yield client
    talking_server.wait_until_idle()


say = speaker


def test_text(client: anthropic.Anthropic, say: Speaker) -> None:
    ids = say("Hello world!")
    answer = client.messages.create(**BASIC, system="Be nice", extra_body={"temperature": 0.5, "top_k": 3})
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == "Hello world!"
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens == len(say.server.mesh.prompts[-1].prompt_ids)
    assert answer.usage.output_tokens == len(ids)
    assert say.last_prompt == "<system>Be nice<user>Hello"
    params = say.server.mesh.prompts[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 500)


def test_thinking_text_and_tool_use(client: anthropic.Anthropic, say: Speaker) -> None:
    say(THOUGHT + "Wait." + CALLS)
    answer = client.messages.create(**BASIC, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    thinking, text, weather, now = answer.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "the dog 🙂"
    assert text.type == "text"
    assert text.text == "Wait."
    assert weather.type == now.type == "tool_use"
    assert (weather.name, weather.input) == ("weather", {"city": "Ulm", "days": 2})
    assert (now.name, now.input) == ("now", {})
    assert weather.id != now.id
    assert answer.stop_reason == "tool_use"
    assert say.last_prompt.startswith('TOOLS[{"type": "function", "function": {"name": "weather"')
    assert say.last_prompt.endswith("THINKING True<user>Hello")


def test_stream_events_come_in_order(client: anthropic.Anthropic, say: Speaker) -> None:
    ids = say(THOUGHT + "Wait." + CALLS)
    events = list(client.messages.create(**BASIC, tools=TOOLS, stream=True))
    names = [
        event.type + (f".{event.delta.type}" if event.type == "content_block_delta" else "")
        for event in events
    ]
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert [name for name, _ in groupby(names)] == [
        "message_start",
        start, f"{delta}.thinking_delta", f"{delta}.signature_delta", stop,
        start, f"{delta}.text_delta", stop,
        start, f"{delta}.input_json_delta", stop,
        start, f"{delta}.input_json_delta", stop,
        "message_delta", "message_stop",
    ]  # fmt: skip
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in starts] == [0, 1, 2, 3]
    assert starts[2].content_block.to_dict() | {"id": ""} == {
        "type": "tool_use",
        "id": "",
        "name": "weather",
        "input": {},
    }
    first, last = events[0], events[-2]
    assert first.type == "message_start"
    assert (first.message.content, first.message.stop_reason) == ([], None)
    assert first.message.usage.input_tokens == len(say.server.mesh.prompts[-1].prompt_ids)
    assert last.type == "message_delta"
    assert (last.delta.stop_reason, last.usage.output_tokens) == ("tool_use", len(ids))


def test_a_ping_comes_early(talking_server: Server, say: Speaker) -> None:
    """Clients keep pings to themselves."""
    say("x")
    lines = talking_server.post("/v1/messages", BASIC | {"stream": True}).text.splitlines()
    assert [line for line in lines if line.startswith("event: ")][:2] == [
        "event: message_start",
        "event: ping",
    ]


def test_the_clients_own_stream_helper_agrees(client: anthropic.Anthropic, say: Speaker) -> None:
    """It puts the message together from the events."""
    say(THOUGHT + "Wait." + CALLS)
    with client.messages.stream(**BASIC, tools=TOOLS) as stream:
        assert "".join(stream.text_stream) == "Wait."
        streamed = stream.get_final_message()
    whole = client.messages.create(**BASIC, tools=TOOLS)

    def without_ids(message: anthropic.types.Message) -> list[dict[str, object]]:
        return [block.to_dict() | {"id": ""} for block in message.content]

    assert without_ids(streamed) == without_ids(whole)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reason", "fields", "stopped"),
    [
        ("Hello wor", FinishReason.LENGTH, {}, ("max_tokens", None)),
        ("one two three", FinishReason.STOP, {"stop_sequences": [" three", "x"]}, ("stop_sequence", " three")),
        ("one", FinishReason.STOP, {}, ("end_turn", None)),
    ],
)  # fmt: skip
def test_why_it_stopped(
    client: anthropic.Anthropic,
    say: Speaker,
    stream: bool,
    text: str,
    reason: FinishReason,
    fields: dict[str, Any],
    stopped: tuple[str, str | None],
) -> None:
    say(text, reason)
    if stream:
        delta: Any = list(client.messages.create(**BASIC, **fields, stream=True))[-2]
        assert (delta.delta.stop_reason, delta.delta.stop_sequence) == stopped
    else:
        answer = client.messages.create(**BASIC, **fields)
        assert (answer.stop_reason, answer.stop_sequence) == stopped


def test_a_call_cut_short(client: anthropic.Anthropic, say: Speaker) -> None:
    say('<tool_call>{"name": "weather", "arguments": {"city": "Ul', FinishReason.LENGTH)
    answer = client.messages.create(**BASIC, tools=TOOLS)
    (block,) = answer.content
    assert block.type == "tool_use"
    assert block.input == {"INVALID_JSON": '{"city": "Ul'}
    assert answer.stop_reason == "max_tokens"


def test_an_answer_can_be_sent_back_as_it_came(client: anthropic.Anthropic, say: Speaker) -> None:
    say(THOUGHT + "Wait." + CALLS)
    first = client.messages.create(**BASIC, tools=TOOLS)
    weather, now = (block for block in first.content if block.type == "tool_use")
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": weather.id, "content": [{"type": "text", "text": "warm"}]},
        {"type": "tool_result", "tool_use_id": now.id, "content": "8:00", "is_error": False},
        {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
    ]
    history: list[Any] = [
        *USER,
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": results},
    ]
    client.messages.create(
        **BASIC | {"messages": history}, tools=TOOLS, system=[{"type": "text", "text": "Rules"}]
    )
    assert say.last_prompt.endswith(
        "<system>Rules<user>Hello<assistant>(the dog 🙂)Wait.CALL weather:UlmCALL now:"
        f"<tool>warm[{weather.id}]<tool>8:00[{now.id}]<user>and?"
    )


@pytest.mark.parametrize("content", ["It is ", [{"type": "text", "text": "It is "}]])
def test_an_answer_that_has_begun_goes_on(server: Server, tokenizer: Tokenizer, content: Any) -> None:
    begun = {"max_tokens": 50, "messages": [*USER, {"role": "assistant", "content": content}]}
    answer = server.post("/v1/messages", begun).json()
    assert [block["text"] for block in answer["content"]] == [" Hello world!"]
    prompt = server.mesh.prompts[-1].prompt_ids
    assert tokenizer.decode(prompt).endswith("user\nHello<|im_end|>\n<|im_start|>assistant\nIt is ")
    assert server.post("/v1/messages/count_tokens", begun).json() == {"input_tokens": len(prompt)}


@pytest.mark.parametrize(
    "content",
    ["", [{"type": "text", "text": "Wait."}, {"type": "tool_use", "id": "1", "name": "now", "input": {}}]],
)
def test_what_is_no_beginning_is_not_gone_on_with(content: Any) -> None:
    ended = {"role": "assistant", "content": "It is"}
    asked = MessagesRequest(max_tokens=5, messages=[*USER, ended, system()])
    assert chat_request(asked).continue_final_message is None
    request = MessagesRequest(max_tokens=5, messages=[*USER, {"role": "assistant", "content": content}])
    assert chat_request(request).continue_final_message is None


def test_a_thread_that_goes_on_is_not_there(client: anthropic.Anthropic, say: Speaker) -> None:
    """Tool runners then send the whole conversation again, as a new thread."""
    say("x")
    assert client.messages.create(**BASIC, extra_body={"thread": {"type": "create"}}).content
    num_asked = len(say.server.mesh.generations)
    going_on = {"type": "continue", "previous_message_id": "msg_1"}
    for messages in (USER, []):
        body = BASIC | {"messages": messages, "thread": going_on}
        answer = say.server.post("/v1/messages?beta=true", body)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["type"], error["details"]) == ("not_found_error", {"error_code": "thread_not_found"})
        assert "send the whole conversation" in error["message"]
    assert len(say.server.mesh.generations) == num_asked
    assert "details" not in say.server.post("/v1/messages", BASIC | {"model": "x"}).json()["error"]


def test_instructions_within_the_conversation(client: anthropic.Anthropic, say: Speaker) -> None:
    say("x")
    messages: list[Any] = [
        *USER,
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "nice"}]},
        {"role": "assistant", "content": "Yes"},
        {"role": "system", "content": "Be short"},
    ]
    client.messages.create(**BASIC | {"messages": messages}, system="Rules")
    assert say.last_prompt == "<system>Rules<user>Hello<system>Be\nnice<assistant>Yes<system>Be short"


def test_instructions_where_the_template_wants_one_message(served: ServedModel, tmp_path: Path) -> None:
    with talking(served, tmp_path, template=SYSTEM_FIRST) as server:
        say = Speaker(server, load_tokenizer(tmp_path))
        say("x")
        late = {"role": "system", "content": [{"type": "text", "text": "Be short"}]}
        body = BASIC | {"system": "Rules", "messages": [*USER, late]}
        assert server.post("/v1/messages", body).status_code == 200
        assert say.last_prompt == "<system>Rules\n\nBe short<user>Hello"
        counted = server.post("/v1/messages/count_tokens", body).json()
        assert counted == {"input_tokens": len(server.mesh.prompts[-1].prompt_ids)}


def tool_names(prompt: str) -> list[str]:
    """What the template shows."""
    shown, _ = json.JSONDecoder().raw_decode(prompt.removeprefix("TOOLS")) if "TOOLS" in prompt else ([], 0)
    return [tool["function"]["name"] for tool in shown]


LATER = TOOLS[0] | {"name": "later", "defer_loading": True}
FOUND = {
    "type": "tool_result",
    "tool_use_id": "t",
    "content": [{"type": "tool_reference", "tool_name": "later"}],
}
SEARCHED: list[Any] = [
    *USER,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "now", "input": {}}]},
    {"role": "user", "content": [FOUND]},
]


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        (USER, ["now"]),
        (SEARCHED, ["now", "later"]),
        ([*USER, system(addition(by_name("later")))], ["now", "later"]),
        ([*USER, system(addition(by_name("later")), removal("later"))], ["now"]),
        ([*USER, system(removal("now"))], []),
        ([*USER, system(removal("now")), *USER, system(addition(by_name("now")))], ["now"]),
        ([*USER, system(addition({"type": "tool_definition", "definition": TOOLS[0]}))], ["now", "weather"]),
    ],
)
def test_tools_that_come_and_go(
    client: anthropic.Anthropic, say: Speaker, messages: list[Any], names: list[str]
) -> None:
    say("x")
    tools: list[Any] = [TOOLS[1], LATER]
    answer = client.messages.create(**BASIC | {"messages": messages}, tools=tools)
    assert tool_names(say.last_prompt) == names
    counted = client.messages.count_tokens(model="tiny", messages=messages, tools=tools)
    assert counted.input_tokens == answer.usage.input_tokens
    assert "<system>" not in say.last_prompt
    if messages is SEARCHED:
        assert say.last_prompt.endswith("<tool>later[t]")


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=sdk-cli;"


@pytest.mark.parametrize(
    ("system", "prompt"),
    [
        ([BILLING], "<user>Hello"),
        ([BILLING, "Rules", "More"], "<system>Rules\nMore<user>Hello"),
        ([BILLING + "\nRules"], "<system>Rules<user>Hello"),
        (["Rules", "x-anthropic-billing-header"], "<system>Rules\nx-anthropic-billing-header<user>Hello"),
    ],
)
def test_billing_is_no_part_of_instructions(
    client: anthropic.Anthropic, say: Speaker, system: list[str], prompt: str
) -> None:
    say("x")
    for session in ("c2b", "f00"):
        blocks: list[Any] = [{"type": "text", "text": text.format(session)} for text in system]
        answer = client.messages.create(**BASIC, system=blocks)
        assert say.last_prompt == prompt
        counted = client.messages.count_tokens(model="tiny", messages=USER, system=blocks)
        assert counted.input_tokens == answer.usage.input_tokens
    client.messages.create(**BASIC, system="\n".join(system))
    assert say.last_prompt == prompt


@pytest.mark.parametrize("line", [BILLING, BILLING + "\nRules"])
def test_billing_is_no_part_of_any_block(client: anthropic.Anthropic, say: Speaker, line: str) -> None:
    say("x")
    blocks: list[Any] = [{"type": "text", "text": text} for text in ("You help.", line, "Be brief.")]
    rules = "\nRules" if "Rules" in line else ""
    client.messages.create(**BASIC, system=blocks)
    assert say.last_prompt == f"<system>You help.{rules}\nBe brief.<user>Hello"
    later: list[Any] = [*USER, {"role": "system", "content": blocks}]
    client.messages.create(model="tiny", max_tokens=9, messages=later)
    assert say.last_prompt == f"<user>Hello<system>You help.{rules}\nBe brief."


THOUGHTFUL: list[Any] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "1", "signature": ""}, {"type": "text", "text": "b"}]},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "2", "signature": ""}, {"type": "tool_use", "id": "t", "name": "now", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "8:00"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "3", "signature": ""}, {"type": "text", "text": "d"}]},
    {"role": "user", "content": "e"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        ({"keep": "all"}, "123"),
        ({"keep": {"type": "all"}}, "123"),
        ({"keep": {"type": "thinking_turns", "value": 2}}, "123"),
        ({"keep": {"type": "thinking_turns", "value": 1}}, "23"),
        ({}, "23"),
    ],
)
def test_thinking_that_is_forgotten(
    client: anthropic.Anthropic, say: Speaker, edit: dict[str, Any], kept: str
) -> None:
    say("x")
    edits = {"edits": [{"type": "clear_thinking_20251015", **edit}]}
    client.messages.create(**BASIC | {"messages": THOUGHTFUL}, extra_body={"context_management": edits})
    assert "".join(mark for mark in "123" if f"({mark})" in say.last_prompt) == kept


def test_thinking_that_is_not_shown(client: anthropic.Anthropic, say: Speaker) -> None:
    say(THOUGHT + "Yes.")
    shown: Any = {"type": "adaptive", "display": "summarized"}
    assert [block.type for block in client.messages.create(**BASIC, thinking=shown).content] == [
        "thinking",
        "text",
    ]
    hidden: Any = {"type": "adaptive", "display": "omitted"}
    assert [block.type for block in client.messages.create(**BASIC, thinking=hidden).content] == ["text"]


def test_text_blocks_have_no_citations(talking_server: Server, say: Speaker) -> None:
    """A null there is refused by clients that look for a list."""
    say("x")
    assert talking_server.post("/v1/messages", BASIC).json()["content"] == [{"type": "text", "text": "x"}]
    assert '"citations"' not in talking_server.post("/v1/messages", BASIC | {"stream": True}).text


def test_count_tokens(client: anthropic.Anthropic, say: Speaker) -> None:
    say("x")
    fields: dict[str, Any] = {"tools": TOOLS, "system": "Be nice", "thinking": {"type": "disabled"}}
    fields["output_config"] = {"effort": "low"}
    count = client.messages.count_tokens(model="tiny", messages=USER, **fields)
    assert say.server.mesh.generations == []
    assert client.messages.create(**BASIC, **fields).usage.input_tokens == count.input_tokens


def test_tokens_are_counted_though_tools_cannot_be_called(served: ServedModel, tmp_path: Path) -> None:
    with talking(served, tmp_path) as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello " * 3000}], "tools": TOOLS}
        answer = server.post("/v1/messages/count_tokens", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["input_tokens"] > 2048


def test_fields_beyond_anthropics(client: anthropic.Anthropic, say: Speaker) -> None:
    say("x")
    client.messages.create(
        **BASIC, extra_body={"structured_outputs": {"regex": "[a-z]"}, "min_tokens": 2, "ignore_eos": True}
    )
    params = say.server.mesh.prompts[-1].params
    assert "[a-z]" in (params.grammar or "")
    assert (params.min_tokens, params.ignore_eos) == (2, True)


def test_thinking_can_be_left_out(client: anthropic.Anthropic, say: Speaker) -> None:
    say(THOUGHT + "Yes.")
    answer = client.messages.create(**BASIC, thinking={"type": "disabled"})
    assert [block.type for block in answer.content] == ["text"]
    assert say.last_prompt.startswith("THINKING False")


def test_one_tool_at_a_time(client: anthropic.Anthropic, say: Speaker) -> None:
    say(CALLS)
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(client.messages.create(**BASIC, tools=TOOLS, tool_choice=choice).content) == 1
    say(CALLS)
    answer = client.messages.create(**BASIC, tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "Expected `int`, got `null` - at `$.max_tokens`"),
        ({"max_tokens": 0}, "at least one token"),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"max_tokens": 9999}, "maximum context length"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0] is an image without source"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, "neither base64 nor url"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa=="}}]}]},
         "this model takes text only"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "block of type 'document'"),
        ({"messages": [{"role": "user", "content": [1]}]}, "block of type ''"),
        ({"messages": [{"role": "user", "content": 5}]}, "must be a string or a list"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": 5}]}]}, "tool_use block without name"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "f"}]}]}, "block without id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}, "text block without text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "signature": ""}]}]}, "thinking block without thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "block without tool_use_id"),
        ({"system": [{"type": "text", "text": 5}]}, "system has a text block without text"),
        ({"thinking": {"budget_tokens": 2048}}, "thinking.type must be enabled, disabled or adaptive"),
        ({"thinking": {"type": "adaptive", "display": "full"}}, "thinking.display must be summarized, updates or omitted"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa=="}}]}]}]},
         "messages[0].content[0].content[0] is of type 'image_url', but this model takes text only"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
         "messages[0].content[0].content[0] is an image without source"),
        ({"system": [{"type": "image"}]}, "system holds other content than text"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only tools of your own"),
        ({"tools": [{"input_schema": {}}]}, "object with a name"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "x"}}], "tool_choice": {"type": "any"}},
            "tools[0] ('f'): Invalid type: x",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "names no function of tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "sometimes"}}, "must be auto, any, tool or none"),
        ({"output_format": {"type": "json_schema", "schema": {"type": "x"}}}, "Invalid type: x"),
        ({"output_config": {"format": {"type": "json_schema", "schema": False}}}, "no answer can follow"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10**30}}, "budget_tokens must be a whole number"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens must be a whole number"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "budget_tokens must be a whole number"),
        ({"stop_sequences": [""]}, "must not be empty"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers is not supported: call them"),
        ({"container": "c1"}, "container is not supported: nothing is run here"),
        ({"compaction": {"type": "summarize"}}, "compaction is not supported"),
        ({"thread": {"type": "resume"}}, "thread.type must be create or continue"),
        ({"thread": {}}, "thread.type must be create or continue"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "task_budget is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits[0].type must be clear_thinking"),
        ({"context_management": {"edits": 5}}, "edits[0].type must be clear_thinking"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 1}]}}, "edits[0].keep must be all"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools has two tools of one name"),
        ({"messages": [*USER, {"role": "system", "content": [addition({"type": "tool_reference", "name": "f"})]}]},
         "names tool 'f', which tools does not have"),
        ({"messages": [*USER, {"role": "system", "content": [addition({"type": "mcp_tool_reference", "name": "f"})]}]},
         "tool_addition needs a tool of your own"),
        ({"tools": [TOOLS[0] | {"input_examples": [{}]}]}, "input_examples is not supported: put them"),
        ({"tools": [TOOLS[0] | {"allowed_callers": ["code_execution_20250825"]}]}, "allowed_callers leaves out direct"),
        ({"tools": [TOOLS[0] | {"allowed_callers": 5}]}, "allowed_callers leaves out direct"),
        ({"tools": [TOOLS[0] | {"allowed_callers": "indirect"}]}, "allowed_callers leaves out direct"),
        ({"output_config": {"effort": 5}}, "output_config.effort must be a string"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs is not supported yet"),
        ({"stop": ["a"]}, "stop is not supported here: use stop_sequences."),
        ({"max_completion_tokens": 5}, "max_completion_tokens is not supported here: use max_tokens."),
        ({"response_format": {"type": "json_object"}}, "use output_config.format"),
        ({"reasoning_effort": "low"}, "use output_config.effort"),
        ({"logprobs": True}, "logprobs is not supported here"),
        ({"n": 2}, "n must be 1: a message has one answer"),
    ],
)  # fmt: skip
def test_what_is_refused(talking_server: Server, fields: dict[str, Any], message: str) -> None:
    talking_server.mesh.generations.clear()
    answer = talking_server.post("/v1/messages", BASIC | fields)
    assert answer.status_code == 400
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert message in body["error"]["message"]
    assert talking_server.mesh.generations == []


def test_a_deep_input_of_a_call() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": deep}
    request = MessagesRequest(max_tokens=5, messages=[{"role": "assistant", "content": [call]}])
    with pytest.raises(ApiError, match="nested too deeply") as caught:
        chat_request(request)
    assert caught.value.status == 400


def test_failures(client: anthropic.Anthropic, say: Speaker) -> None:
    import anthropic

    say("x")
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**BASIC | {"model": "x"})
    say.server.mesh.refusal = MeshError(503, "ServiceUnavailableError", "full", retry_after=1)
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        client.messages.create(**BASIC)
    say.server.mesh.reset(failing("out of luck", after=[80, 81]))
    with pytest.raises(anthropic.APIStatusError, match="out of luck"):
        list(client.messages.create(**BASIC, stream=True))


def test_keys(served: ServedModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Anthropic's clients present theirs as X-Api-Key."""
    import anthropic

    with talking(served, tmp_path, api_key=("secret",)) as server:
        Speaker(server, tokenizer)("Hi")
        with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
            assert client.messages.create(**BASIC).content
        with (
            anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError, match="authentication_error"),
        ):
            client.messages.create(**BASIC)
