"""/v1/responses as the real OpenAI client sees it: a real server, a scripted mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.messages import FinishReason
from router.mesh import MeshError, ServedModel
from router.text.tokens import load_tokenizer
from tests.router.conftest import Server
from tests.router.fake_mesh import failing
from tests.router.talking import (
    CALLS,
    SYSTEM_FIRST,
    THOUGHT,
    TOOL_FLAGS,
    Speaker,
    openai_client,
    speaker,
    talking,
)

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    },
    {"type": "function", "name": "now", "parameters": {}, "strict": None},
]


@pytest.fixture(scope="module")
def talking_server(served: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = TOOL_FLAGS | {"reasoning_parser": "qwen3", "enable_prompt_tokens_details": True}
    with talking(served, tmp_path_factory.mktemp("responses"), **flags) as server:
        yield server


client = openai_client
say = speaker


def test_text(client: openai.OpenAI, say: Speaker) -> None:
    ids = say("Hello world!")
    answer = client.responses.create(model="tiny", input="Hello", metadata={"a": "b"}, temperature=0.5)
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.model, answer.status) == ("response", "tiny", "completed")
    assert answer.output_text == "Hello world!"
    assert (answer.temperature, answer.metadata, answer.parallel_tool_calls) == (0.5, {"a": "b"}, True)
    assert answer.error is answer.incomplete_details is None
    assert answer.model_extra is not None
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(say.server.mesh.prompts[-1].prompt_ids)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens == len(ids)
    assert answer.usage.total_tokens == answer.usage.input_tokens + len(ids)
    assert say.last_prompt == "<user>Hello"


def test_reasoning_text_and_calls(client: openai.OpenAI, say: Speaker) -> None:
    say(THOUGHT + "Wait." + CALLS)
    answer = client.responses.create(model="tiny", input="Hello", tools=TOOLS)
    reasoning, message, weather, now = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "the dog 🙂"
    assert message.type == "message"
    assert answer.output_text == "Wait."
    assert weather.type == now.type == "function_call"
    assert (weather.name, weather.arguments, weather.status) == (
        "weather",
        '{"city": "Ulm", "days": 2}',
        "completed",
    )
    assert (now.name, now.arguments) == ("now", "{}")
    assert weather.call_id != now.call_id
    assert len({item.id for item in answer.output}) == 4
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_stream_events_come_in_order(client: openai.OpenAI, say: Speaker) -> None:
    say(THOUGHT + "Wait." + CALLS)
    events = list(client.responses.create(model="tiny", input="Hello", tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds: list[str] = []
    for event in events:
        if not kinds or kinds[-1] != event.type:
            kinds.append(event.type.removeprefix("response."))
            kinds[-1] = event.type
    names = [kind.removeprefix("response.") for kind in kinds]
    part = ["output_item.added", "content_part.added"]
    ends = ["content_part.done", "output_item.done"]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert names == [
        "created", "in_progress",
        *part, "reasoning_text.delta", "reasoning_text.done", *ends,
        *part, "output_text.delta", "output_text.done", *ends,
        *call, *call,
        "completed",
    ]  # fmt: skip
    final = events[-1]
    assert final.type == "response.completed"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in final.response.output]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.response.output_text == "Wait."
    arguments = [
        event.delta
        for event in events
        if event.type == "response.function_call_arguments.delta" and event.output_index == 2
    ]
    assert len(arguments) > 5
    assert "".join(arguments) == '{"city": "Ulm", "days": 2}'
    assert final.response.usage is not None


def test_the_clients_own_stream_helper_agrees(client: openai.OpenAI, say: Speaker) -> None:
    """It puts the response together from the events, and asserts on their order."""
    say(THOUGHT + "Wait." + CALLS)
    with client.responses.stream(model="tiny", input="Hello", tools=TOOLS) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_response()
    assert answer.output_text == "Wait."
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]


@pytest.mark.parametrize("stream", [False, True])
def test_cut_short(client: openai.OpenAI, say: Speaker, stream: bool) -> None:
    say("Hello wor", FinishReason.LENGTH)
    answer: Any = client.responses.create(model="tiny", input="x", max_output_tokens=50, stream=stream)
    if stream:
        last = list(answer)[-1]
        assert last.type == "response.incomplete"
        answer = last.response
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    assert answer.max_output_tokens == 50


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI, say: Speaker) -> None:
    say(THOUGHT + "Wait." + CALLS)
    first = client.responses.create(model="tiny", input="Hello", tools=TOOLS)
    weather, now = (item for item in first.output if item.type == "function_call")
    history: list[Any] = [
        {"role": "developer", "content": "Be nice"},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        *[item.model_dump() for item in first.output],
        {"type": "function_call_output", "call_id": weather.call_id, "output": "warm"},
        {
            "type": "function_call_output",
            "call_id": now.call_id,
            "output": [{"type": "input_text", "text": "8:00"}],
        },
        {"type": "message", "role": "user", "content": "and?"},
    ]
    client.responses.create(model="tiny", input=history, instructions="Rules", tools=TOOLS)
    assert say.last_prompt.endswith(
        "<system>Rules<system>Be nice<user>Hello<assistant>(the dog 🙂)Wait.CALL weather:UlmCALL now:"
        f"<tool>warm[{weather.call_id}]<tool>8:00[{now.call_id}]<user>and?"
    )
    assert '{"type": "function", "function": {"name": "weather"' in say.last_prompt


def test_instructions_where_the_template_wants_one_message(served: ServedModel, tmp_path: Path) -> None:
    with talking(served, tmp_path, template=SYSTEM_FIRST) as server:
        say = Speaker(server, load_tokenizer(tmp_path))
        say("x")
        items = [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be nice"}]},
            {"role": "developer", "content": "Be short"},
            {"role": "user", "content": "Hello"},
        ]
        assert server.post("/v1/responses", {"input": items, "instructions": "Rules"}).status_code == 200
        assert say.last_prompt == "<system>Rules\n\nBe nice\n\nBe short<user>Hello"


@pytest.mark.parametrize("arguments", ["{", '{"city": "Ul', "[1]", "5"])
def test_a_call_without_json_comes_back(served: ServedModel, tmp_path: Path, arguments: str) -> None:
    """A model slips, or is cut; the conversation goes on."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"
    )
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "c1", "output": "That was no JSON."}
    items = [{"role": "user", "content": "Hello"}, call, result]
    function = {"name": "weather", "arguments": arguments}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "That was no JSON."},
    ]
    with talking(served, tmp_path, template=template) as server:
        say = Speaker(server, load_tokenizer(tmp_path))
        say("x")
        for path, body in (
            ("/v1/responses", {"input": items}),
            ("/v1/chat/completions", {"messages": messages}),
        ):
            assert server.post(path, body).status_code == 200
            assert say.last_prompt == f"<user>Hello<assistant>INVALID_JSON={arguments}<tool>That was no JSON."


def test_two_answers_of_the_assistant_stay_two(client: openai.OpenAI, say: Speaker) -> None:
    say("x")
    history: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "d"}],
        },
        {"role": "assistant", "content": "e"},
    ]
    client.responses.create(model="tiny", input=history)
    assert say.last_prompt == "<user>a<assistant>b<assistant>c<assistant>(d)e"


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"previous_response_id": "resp_1"}, "answers are not kept", "previous_response_id"),
        ({"previous_response": {"id": "resp_1"}}, "answers are not kept", "previous_response"),
        ({"conversation": "c"}, "answers are not kept", "conversation"),
        ({"background": True}, "answers are not kept", "background"),
        ({"prompt": {"id": "p"}}, "answers are not kept", "prompt"),
        ({"truncation": "auto"}, "truncation", "truncation"),
        ({"top_logprobs": 21}, "top_logprobs must be between 0 and 20", "top_logprobs"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "x"}}], "tool_choice": "required"}, "Invalid type: x", "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "names no function", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "x"}}, "names no function", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "x", "name": "x"}}, "'x' is not supported", "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "json_schema", "text"),
        ({"text": {"format": {"type": "xml"}}}, "text.type must be text, json_object", "text"),
        ({"max_output_tokens": 0}, "at least one token", "max_output_tokens"),
        ({"max_output_tokens": -1}, "max_output_tokens must be at least 0", "max_output_tokens"),
        ({"max_output_tokens": 9999}, "maximum context length", "input"),
        ({"temperature": -1}, "temperature must be", "temperature"),
        ({"reasoning": {"effort": 1}}, "effort must be a string", "reasoning"),
        ({"input": []}, "input must not be empty", "input"),
        ({"input": 1}, "Expected `str | array`", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "type 'item_reference'", "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id must be a string", "input"),
        ({"input": [{"type": "function_call_output", "output": "f"}]}, "call_id must be a string", "input"),
        ({"input": [{"content": "f"}]}, "input[0].role must be a string", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "takes text only", "input[0].content[0]"),
        ({"context_management": [{"type": "compaction"}]}, "nothing of a conversation", "context_management"),
        ({"enable_response_messages": True}, "is not supported", "enable_response_messages"),
        ({"previous_input_messages": [{}]}, "send them as input", "previous_input_messages"),
        ({"text": {"verbosity": 1}}, "text.verbosity must be a string", "text"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs is not supported yet", "vllm_xargs"),
        ({"bad_words": [" "]}, "bad_words must not be empty", "bad_words"),
        ({"guided_regex": "("}, "unclosed group", "guided_regex"),
        ({"max_tokens": 5}, "max_tokens is not supported here: use max_output_tokens.", "max_tokens"),
        ({"max_completion_tokens": 5}, "use max_output_tokens", "max_completion_tokens"),
        ({"response_format": {"type": "json_object"}}, "use text.format", "response_format"),
        ({"reasoning_effort": "low"}, "use reasoning.effort", "reasoning_effort"),
        ({"logprobs": True}, "use top_logprobs", "logprobs"),
        ({"messages": [{"role": "user", "content": "a"}]}, "use input", "messages"),
        ({"n": 2}, "n must be 1: a response has one answer", "n"),
        ({"model": "x"}, "does not exist", "model"),
    ],
)  # fmt: skip
def test_what_is_refused(talking_server: Server, fields: dict[str, Any], message: str, param: str) -> None:
    talking_server.mesh.generations.clear()
    answer = talking_server.post("/v1/responses", {"input": "Hello"} | fields)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == param
    assert talking_server.mesh.generations == []


def test_fields_that_are_accepted(client: openai.OpenAI, say: Speaker) -> None:
    say("x")
    answer = client.responses.create(
        model="tiny", input="Hello", store=True, user="me", top_p=0.9, truncation="disabled",
        reasoning={"effort": "low"}, text={"format": {"type": "text"}}, service_tier="auto",
        include=["reasoning.encrypted_content"], tool_choice="auto", parallel_tool_calls=False,
        extra_body={"n": 1, "max_tokens": None, "logprobs": False, "response_format": {"type": "text"}, "seed": 5, "top_k": 3, "logit_bias": {"7": -5}, "stop_token_ids": [9],
                    "chat_template_kwargs": {"enable_thinking": True}},
    )  # fmt: skip
    assert answer.model_extra is not None
    assert answer.model_extra["store"] is False, "nothing is kept"
    prompt = say.server.mesh.prompts[-1]
    assert (prompt.seed, prompt.params.top_k, prompt.params.top_p) == (5, 3, 0.9)
    assert (prompt.params.logit_bias, prompt.params.stop_token_ids) == ({7: -5.0}, (9,))
    assert say.last_prompt == "THINKING True<user>Hello"


def test_nothing_is_kept(client: openai.OpenAI) -> None:
    kept = client.responses
    for call in (kept.retrieve, kept.delete, kept.cancel, kept.input_items.list):
        with pytest.raises(openai.NotFoundError, match="not kept"):
            call("resp_1")  # type: ignore[operator]


def test_input_tokens_are_counted(client: openai.OpenAI, say: Speaker) -> None:
    say("x")
    fields: dict[str, Any] = {"model": "tiny", "input": "Hello", "instructions": "Be nice", "tools": TOOLS}
    count = client.responses.input_tokens.count(**fields)
    assert say.server.mesh.generations == []
    usage = client.responses.create(**fields).usage
    assert usage is not None
    assert count.input_tokens == usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="input must not be empty"):
        client.responses.input_tokens.count(model="tiny", input=[])


def test_input_tokens_are_counted_beyond_the_context(client: openai.OpenAI, say: Speaker) -> None:
    """Clients count before they cut."""
    say("x")
    assert client.responses.input_tokens.count(model="tiny", input="Hello " * 3000).input_tokens > 2048


def test_effort_none_switches_thinking_off(client: openai.OpenAI, say: Speaker) -> None:
    for effort, begin in (("none", "THINKING False"), ("low", "THINKING True")):
        say("x")
        client.responses.create(model="tiny", input="Hello", reasoning={"effort": effort})  # type: ignore[typeddict-item]
        assert say.last_prompt == f"{begin}<user>Hello"
    say("x")
    told = {"chat_template_kwargs": {"enable_thinking": True}}
    client.responses.create(model="tiny", input="Hello", reasoning={"effort": "none"}, extra_body=told)
    assert say.last_prompt == "THINKING True<user>Hello"


def test_a_failure_before_anything_was_said(served: ServedModel, tmp_path: Path) -> None:
    """A comment that keeps the connection alive has opened the stream."""
    with talking(served, tmp_path, sse_keep_alive_interval=0.05) as server:
        server.mesh.reset(failing("out of luck"))
        server.mesh.delay = 0.3
        with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
            events = list(client.responses.create(model="tiny", input="x", stream=True))
        assert [event.type for event in events] == [
            "response.created",
            "response.in_progress",
            "response.failed",
        ]
        assert [event.sequence_number for event in events] == [0, 1, 2]


def test_failures(client: openai.OpenAI, say: Speaker) -> None:
    say("x")
    say.server.mesh.refusal = MeshError(503, "ServiceUnavailableError", "full", retry_after=1)
    with pytest.raises(openai.InternalServerError, match="full"):
        client.responses.create(model="tiny", input="x", stream=True)
    said = say.tokenizer.encode(THOUGHT + "Wait", add_special_tokens=False)
    say.server.mesh.reset(failing("out of luck", after=said))
    events = list(client.responses.create(model="tiny", input="x", stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    statuses = [(item.type, item.status) for item in last.response.output]
    assert statuses == [("reasoning", "completed"), ("message", "incomplete")]
    assert last.response.error is not None
    assert last.response.error.message == "out of luck"
