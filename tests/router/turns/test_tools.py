"""Tools and reasoning for clients: real OpenAI client, real server, scripted mesh."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from engine.messages import Delta, FinishReason
from router.config import HttpConfig
from router.mesh import Prompt, ServedModel
from router.text.tokens import Tokenizer, load_tokenizer
from router.turns import harmony
from tests.router import tiny_tokenizer
from tests.router.conftest import Server, events, serving
from tests.router.fake_mesh import FakeMesh, saying
from tests.router.talking import CALLS, THOUGHT, TOOL_FLAGS, Speaker, talking

USER: list[Any] = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "now"}},
]


RESPONSES_TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }
]


@pytest.fixture(scope="module")
def tool_server(served: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("tools")
    with talking(served, directory, **TOOL_FLAGS, reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture
def client(tool_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tool_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
    tool_server.wait_until_idle()


@pytest.fixture
def say(tool_server: Server, tokenizer: Tokenizer) -> Speaker:
    return Speaker(tool_server, tokenizer)


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the deltas of a stream make, and its chunks."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": []}
    chunks = list(client.chat.completions.create(model="tiny", messages=USER, stream=True, **fields))
    for chunk in chunks:
        if not chunk.choices:
            continue
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        for name in ("reasoning", "reasoning_content"):
            message[name] += getattr(delta, name, None) or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(message["calls"])
                assert call.type == "function"
                message["calls"].append([call.function.name, ""])
            message["calls"][call.index][1] += call.function.arguments or ""
    message["finish_reason"] = chunks[-1].choices[0].finish_reason if chunks[-1].choices else None
    return message, chunks


# ---- calls


def test_calls(client: openai.OpenAI, say: Speaker) -> None:
    say("Let me see.\n" + CALLS)
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    found = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls]  # type: ignore[union-attr]
    assert found == [
        ("function", "weather", '{"city": "Ulm", "days": 2}'),
        ("function", "now", "{}"),
    ]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_only_calls_have_null_content(client: openai.OpenAI, say: Speaker) -> None:
    say(CALLS)
    choice = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS).choices[0]
    assert choice.message.content is None


def test_streamed_calls_say_the_same(client: openai.OpenAI, say: Speaker) -> None:
    say("Let me see.\n" + CALLS)
    message, chunks = streamed(client, tools=TOOLS)
    assert message["content"] == "Let me see."
    assert message["calls"] == [["weather", '{"city": "Ulm", "days": 2}'], ["now", "{}"]]
    assert message["finish_reason"] == "tool_calls"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    pieces = [
        call.function.arguments
        for chunk in chunks
        for call in chunk.choices[0].delta.tool_calls or []
        if call.index == 0
    ]
    assert len([piece for piece in pieces if piece]) > 5, "arguments come as the model writes them"


def test_each_choice_is_read_by_itself(client: openai.OpenAI, say: Speaker) -> None:
    say(CALLS)
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, n=3)
    assert [len(choice.message.tool_calls or []) for choice in answer.choices] == [2, 2, 2]


def test_one_call_at_a_time(client: openai.OpenAI, say: Speaker) -> None:
    say(CALLS)
    fields: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    choice = client.chat.completions.create(model="tiny", messages=USER, **fields).choices[0]
    assert [call.function.name for call in choice.message.tool_calls or []] == ["weather"]  # type: ignore[union-attr]
    assert [name for name, _ in streamed(client, **fields)[0]["calls"]] == ["weather"]


def test_a_call_cut_short_is_no_finished_call(client: openai.OpenAI, say: Speaker) -> None:
    say(CALLS[:50], FinishReason.LENGTH)
    choice = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS).choices[0]
    assert choice.finish_reason == "length"
    assert [call.function.name for call in choice.message.tool_calls or []] == ["weather"]  # type: ignore[union-attr]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_a_choice_of_tools_all_is_content(
    client: openai.OpenAI, say: Speaker, fields: dict[str, Any]
) -> None:
    say(CALLS)
    choice = client.chat.completions.create(model="tiny", messages=USER, **fields).choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALLS, "stop")
    assert choice.message.tool_calls is None
    assert streamed(client, **fields)[0]["content"] == CALLS


def test_log_probabilities_stay_with_their_tokens(tool_server: Server, say: Speaker) -> None:
    ids = say("x " + CALLS)
    body = {"messages": USER, "tools": TOOLS, "logprobs": True, "stream": True, "return_token_ids": True}
    text = tool_server.post("/v1/chat/completions", body).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    logprobs = [
        entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert len(logprobs) == len(ids)
    assert [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])] == ids


# ---- prompts


def test_the_template_sees_the_round_trip(client: openai.OpenAI, say: Speaker) -> None:
    """An answer can be sent back as it came, and the tool's result with it."""
    say(THOUGHT + CALLS)
    message = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS).choices[0].message
    assert message.tool_calls is not None
    call_id = message.tool_calls[0].id
    result = {"role": "tool", "tool_call_id": call_id, "content": [{"type": "text", "text": "warm"}]}
    history: list[Any] = [*USER, message.model_dump(), result]
    client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)
    prompt = say.last_prompt
    assert prompt.startswith('TOOLS[{"type": "function", "function": {"name": "weather"')
    assert prompt.endswith(
        f"<user>Hello<assistant>(the dog 🙂)CALL weather:UlmCALL now:<tool>warm[{call_id}]"
    )


@pytest.mark.parametrize(("excludes", "shown"), [(False, True), (True, False)])
def test_tools_that_may_not_be_called(
    served: ServedModel, tokenizer: Tokenizer, tmp_path: Path, excludes: bool, shown: bool
) -> None:
    with talking(served, tmp_path, exclude_tools_when_tool_choice_none=excludes) as server:
        server.mesh.script = saying([5])
        body = {"messages": USER, "tools": TOOLS, "tool_choice": "none"}
        assert server.post("/v1/chat/completions", body).status_code == 200
        assert ("TOOLS" in tokenizer.decode(server.mesh.prompts[0].prompt_ids)) is shown


def allowed(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


@pytest.mark.parametrize(("mode", "must"), [("auto", False), ("required", True)])
def test_only_allowed_tools_are_offered(say: Speaker, mode: str, must: bool) -> None:
    say('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    body = {"messages": USER, "tools": TOOLS, "tool_choice": allowed(mode, "now")}
    choice = say.server.post("/v1/chat/completions", body).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert choice["finish_reason"] == "tool_calls"
    assert [f'"{name}"' in say.last_prompt for name in ("now", "weather")] == [True, False]
    grammar = say.server.mesh.prompts[-1].params.grammar
    assert (grammar is not None) is must
    assert "weather" not in (grammar or "")


def test_allowed_tools_keep_their_numbers(say: Speaker) -> None:
    say("x")
    wrong = {"type": "function", "function": {"name": "wrong", "parameters": {"type": "x"}}}
    body = {"messages": USER, "tools": [*TOOLS, wrong], "tool_choice": allowed("required", "wrong")}
    answer = say.server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert f"tools[{len(TOOLS)}] ('wrong')" in answer.json()["error"]["message"]


def test_variables_of_the_template_have_defaults(
    served: ServedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with talking(served, tmp_path, default_chat_template_kwargs='{"enable_thinking": false}') as server:
        say = Speaker(server, tokenizer)
        say("x")
        server.post("/v1/chat/completions", {"messages": USER})
        assert say.last_prompt == "THINKING False<user>Hello"
        server.post(
            "/v1/chat/completions", {"messages": USER, "chat_template_kwargs": {"enable_thinking": True}}
        )
        assert say.last_prompt == "THINKING True<user>Hello"


def test_markers_that_are_special_tokens_are_read(served: ServedModel, tmp_path: Path) -> None:
    """<|im_start|> stands for a marker that skip_special_tokens would hide."""
    tiny_tokenizer.write_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "[TOOL_CALLS]"))
    model = msgspec.structs.replace(served, directory=str(tmp_path))
    config = HttpConfig(enable_auto_tool_choice=True, tool_call_parser="mistral")
    with serving(FakeMesh(model, saying([])), config) as server:
        tokenizer = load_tokenizer(tmp_path)
        ids = tokenizer.encode('[TOOL_CALLS]f{"a": 1}', add_special_tokens=False)
        assert ids[0] == tiny_tokenizer.IM_START
        server.mesh.script = saying([*ids, tiny_tokenizer.EOS], FinishReason.STOP)
        body = {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"arguments": '{"a": 1}', "name": "f"}
        assert len(call["id"]) == 9


# ---- reasoning


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning(client: openai.OpenAI, say: Speaker, stream: bool) -> None:
    say(THOUGHT + "Yes.")
    if stream:
        message, _ = streamed(client)
        assert (message["content"], message["finish_reason"]) == ("Yes.", "stop")
        assert message["reasoning"] == message["reasoning_content"] == "the dog 🙂"
        return
    answer = client.chat.completions.create(model="tiny", messages=USER)
    found: Any = answer.choices[0].message
    assert (found.content, found.reasoning, found.reasoning_content) == ("Yes.", "the dog 🙂", "the dog 🙂")
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    reasoning_tokens = answer.usage.completion_tokens_details.reasoning_tokens
    assert reasoning_tokens is not None
    assert 0 < reasoning_tokens < answer.usage.completion_tokens


def test_usage_counts_reasoning_alike_in_streams(client: openai.OpenAI, say: Speaker) -> None:
    say(THOUGHT + "Yes.")
    whole = client.chat.completions.create(model="tiny", messages=USER).usage
    _, chunks = streamed(client, stream_options={"include_usage": True})
    assert chunks[-1].usage == whole


def test_reasoning_that_never_ends(client: openai.OpenAI, say: Speaker) -> None:
    say("<think>and so on", FinishReason.LENGTH)
    found: Any = client.chat.completions.create(model="tiny", messages=USER).choices[0]
    assert (found.message.content, found.message.reasoning) == (None, "and so on")
    assert found.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out(tool_server: Server, say: Speaker, stream: bool) -> None:
    say(THOUGHT + "Yes.")
    body = {"messages": USER, "include_reasoning": False, "stream": stream}
    text = tool_server.post("/v1/chat/completions", body).text
    assert "reasoning" not in text.replace("reasoning_tokens", "").replace('"reasoning":null', "")
    assert "dog" not in text
    assert "".join(re.findall(r'"content":"([^"]*)"', text)) == "Yes."


def test_reasoning_and_calls(client: openai.OpenAI, say: Speaker) -> None:
    say(THOUGHT + CALLS)
    message, _ = streamed(client, tools=TOOLS)
    assert (message["content"], message["reasoning"]) == ("", "the dog 🙂")
    assert len(message["calls"]) == 2


# ---- flags


def test_tools_need_a_parser(server: Server) -> None:
    answer = server.post("/v1/chat/completions", {"messages": USER, "tools": TOOLS})
    assert answer.status_code == 400
    assert "requires --enable-auto-tool-choice and --tool-call-parser" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tool_call_parser": "x"}, "--tool-call-parser must be one of hermes"),
        ({"reasoning_parser": "x"}, "--reasoning-parser must be one of deepseek_r1"),
        ({"enable_auto_tool_choice": True}, "needs --tool-call-parser"),
    ],
)
def test_flags_that_make_no_sense(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HttpConfig(**flags)


def test_the_clients_own_stream_helper_agrees(client: openai.OpenAI, say: Speaker) -> None:
    say(THOUGHT + "Wait." + CALLS)
    with client.chat.completions.stream(model="tiny", messages=USER, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        streamed_message: Any = stream.get_final_completion().choices[0]
    whole: Any = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS).choices[0]
    assert {
        "content.delta",
        "tool_calls.function.arguments.delta",
        "tool_calls.function.arguments.done",
    } <= kinds
    assert streamed_message.finish_reason == whole.finish_reason == "tool_calls"
    assert streamed_message.message.content == whole.message.content
    assert streamed_message.message.reasoning == whole.message.reasoning
    for streamed_call, call in zip(
        streamed_message.message.tool_calls, whole.message.tool_calls, strict=True
    ):
        assert streamed_call.function.name == call.function.name
        assert streamed_call.function.arguments == call.function.arguments


def test_the_example_holds_a_conversation(tool_server: Server, tokenizer: Tokenizer) -> None:
    def answer(prompt: Prompt) -> Sequence[Delta]:
        knows = "It rains in Ulm" in tokenizer.decode(prompt.prompt_ids)
        call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
        text = "Take one with you." if knows else THOUGHT + call
        ids = [*tokenizer.encode(text, add_special_tokens=False), tiny_tokenizer.EOS]
        return saying(ids, FinishReason.STOP)(prompt)

    tool_server.mesh.reset(answer)
    example = Path(__file__).parents[3] / "examples" / "tools.py"
    done = subprocess.run(
        [sys.executable, str(example), "--base-url", tool_server.url + "/v1"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        'weather({"city": "Ulm"}) -> It rains in Ulm, 9 degrees.',
        "Take one with you.",
    ]


# ---- Harmony


def test_a_model_that_writes_harmony_needs_no_flags(served: ServedModel, tmp_path: Path) -> None:
    with talking(served, tmp_path, special=harmony.MARKERS) as server:
        say = Speaker(server, load_tokenizer(tmp_path))
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            say("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!")
            choice = client.chat.completions.create(model="tiny", messages=USER).choices[0]
            assert (choice.message.content, choice.finish_reason) == ("Hello!", "stop")
            assert choice.message.model_extra is not None
            assert choice.message.model_extra["reasoning"] == "Hm."
            text = (
                "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + '{"city": "Ulm"}'
            )
            say("<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant" + text)
            message, _ = streamed(client, tools=TOOLS)
            assert message["content"] == "Let me see."
            assert message["calls"] == [["weather", '{"city": "Ulm"}']]
            assert message["finish_reason"] == "tool_calls"
            say(text)
            items = client.responses.create(model="tiny", input="Hello", tools=RESPONSES_TOOLS).output
            assert [item.type for item in items] == ["function_call"]
        server.wait_until_idle()


# ---- budgets of reasoning


def test_a_budget_of_reasoning(
    client: openai.OpenAI, say: Speaker, served: ServedModel, tmp_path: Path
) -> None:
    """It is the instance that keeps it."""
    say("x")
    client.chat.completions.create(model="tiny", messages=USER, extra_body={"thinking_token_budget": 7})
    thinking = say.server.mesh.prompts[-1].params.thinking
    assert thinking is not None
    ids = [tuple(say.tokenizer.encode(tag, add_special_tokens=False)) for tag in ("<think>", "</think>")]
    assert (thinking.tokens, thinking.begin, thinking.end) == (7, (ids[0],), ids[1])
    client.chat.completions.create(model="tiny", messages=USER, extra_body={"thinking_token_budget": -1})
    assert say.server.mesh.prompts[-1].params.thinking is None
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": USER}
    body["thinking"] = {"type": "enabled", "budget_tokens": 5}
    assert say.server.post("/v1/messages", body).status_code == 200
    thinking = say.server.mesh.prompts[-1].params.thinking
    assert thinking is not None
    assert thinking.tokens == 5
    with talking(served, tmp_path) as other:
        Speaker(other, say.tokenizer)("x")
        assert other.post("/v1/messages", body).status_code == 200, "where no reasoning is known it is advice"
        refused = other.post("/v1/chat/completions", {"messages": USER, "thinking_token_budget": 7})
        assert "thinking_token_budget needs --reasoning-parser" in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def forcing_server(served: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without a parser: calls are made as a list in JSON."""
    with talking(served, tmp_path_factory.mktemp("forcing")) as server:
        yield server


FORCED = '[{"name": "weather", "parameters": {"city": "Ulm"}}, {"name": "now", "parameters": {}}]'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "cut", ["[", '[{"na', '[{"name": "wea', '[{"name": "weather", "parameters": {}}, {"n']
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_that_was_cut(
    forcing_server: Server, tokenizer: Tokenizer, choice: Any, cut: str, stream: bool
) -> None:
    Speaker(forcing_server, tokenizer)(cut, FinishReason.LENGTH)
    body = {"messages": USER, "tools": TOOLS, "tool_choice": choice, "stream": stream}
    text = forcing_server.post("/v1/chat/completions", body).text
    choices = [each["choices"][0] for each in (events(text) if stream else [json.loads(text)])]
    said = [each.get("delta") or each.get("message") or {} for each in choices]
    assert not any(each.get("content") for each in said)
    assert choices[-1]["finish_reason"] == "length"
    calls = [call for each in said for call in each.get("tool_calls") or () if call["function"].get("name")]
    assert len(calls) == cut.count("}}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_was_cut_elsewhere(
    forcing_server: Server, tokenizer: Tokenizer, stream: bool
) -> None:
    Speaker(forcing_server, tokenizer)('[{"na', FinishReason.LENGTH)
    body = {"input": "a", "tools": RESPONSES_TOOLS, "tool_choice": "required", "stream": stream}
    text = forcing_server.post("/v1/responses", body).text
    assert ("output_text" in text, '"max_output_tokens"' in text) == (False, True)
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    body = {
        "messages": USER,
        "max_tokens": 9,
        "tools": tools,
        "tool_choice": {"type": "any"},
        "stream": stream,
    }
    text = forcing_server.post("/v1/messages", body).text
    assert ('"text"' in text, '"stop_reason":"max_tokens"' in text) == (False, True)


def test_a_forced_call_that_is_whole(forcing_server: Server, tokenizer: Tokenizer) -> None:
    Speaker(forcing_server, tokenizer)(FORCED)
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "required"}
    message = forcing_server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "now"]
