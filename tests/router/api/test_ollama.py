"""Ollama's API: its fields and shapes, over a real server and a scripted mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from router.mesh import ServedModel
from tests.router.conftest import Server
from tests.router.fake_mesh import failing
from tests.router.talking import CALLS, THOUGHT, TOOL_FLAGS, Speaker, speaker, talking

USER: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
LAST = {
    "model", "created_at", "done", "done_reason", "total_duration", "load_duration", "prompt_eval_count",
    "prompt_eval_duration", "eval_count", "eval_duration",
}  # fmt: skip
"""Fields of a last line beside its message or text."""


@pytest.fixture(scope="module")
def talking_server(served: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("ollama")
    with talking(served, directory, **TOOL_FLAGS, reasoning_parser="qwen3") as server:
        yield server


say = speaker


def lines(answer: httpx2.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def refused(answer: httpx2.Response, status: int = 400) -> str:
    """The message of an error, which has Ollama's shape."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    message: str = body["error"]
    return message


def test_a_chat_is_a_stream_of_lines_unless_it_is_not(server: Server) -> None:
    *parts, last = lines(server.post("/api/chat", {"model": "tiny:latest", "messages": USER}))
    assert "".join(each["message"]["content"] for each in parts) == " Hello world!"
    assert len(parts) > 1
    assert {each["message"]["role"] for each in parts} == {"assistant"}
    assert not any(each["done"] for each in parts)
    assert last.keys() == LAST | {"message"}
    assert (last["message"]["content"], last["done"], last["done_reason"]) == ("", True, "length")
    assert last["model"] == "tiny:latest"
    whole = server.post("/api/chat", {"model": "tiny", "messages": USER, "stream": False}).json()
    assert whole.keys() == LAST | {"message"}
    assert whole["message"] == {"role": "assistant", "content": " Hello world!"}
    assert whole["eval_count"] == last["eval_count"] > 1
    assert whole["prompt_eval_count"] == len(server.mesh.prompts[-1].prompt_ids)
    assert 0 < whole["prompt_eval_duration"] <= whole["total_duration"]
    assert whole["created_at"].endswith("Z")


def test_generation_of_text_by_the_template_and_raw(server: Server, tokenizer: Any) -> None:
    *parts, last = lines(server.post("/api/generate", {"model": "tiny", "prompt": "Hi", "system": "Be."}))
    assert "".join(each["response"] for each in parts) == " Hello world!"
    assert (last["response"], last["done"]) == ("", True)
    prompt = tokenizer.decode(server.mesh.prompts[-1].prompt_ids)
    assert prompt.index("system") < prompt.index("Be.") < prompt.index("user") < prompt.index("Hi")
    raw = server.post("/api/generate", {"prompt": "Hi", "raw": True, "stream": False}).json()
    assert raw["response"] == " Hello world!"
    asked = server.mesh.prompts[-1]
    assert tokenizer.decode(asked.prompt_ids) == "<bos>Hi"
    assert asked.params.max_tokens == 256 - len(asked.prompt_ids), (
        "up to the context length, as Ollama has it"
    )


def test_options_are_sampling_parameters(server: Server) -> None:
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "num_predict": 2, "stop": "x",
        "repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "num_ctx": 256,
        "num_thread": 4, "repeat_last_n": -1,
    }  # fmt: skip
    asked = {"model": "tiny", "messages": USER, "options": options, "keep_alive": "5m", "stream": False}
    assert server.post("/api/chat", asked).status_code == 200
    prompt = server.mesh.prompts[-1]
    params = prompt.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.9, 0.1)
    assert (prompt.seed, params.max_tokens, params.repetition_penalty) == (3, 2, 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (0.3, 0.4)
    for penalty in ({"repeat_penalty": 1.2, "repeat_last_n": 0}, {"num_predict": -1}):
        server.post("/api/chat", {"messages": USER, "options": penalty, "stream": False})
        assert server.mesh.prompts[-1].params.repetition_penalty == 1
        assert server.mesh.prompts[-1].params.max_tokens > 100


def test_logprobs(server: Server) -> None:
    asked = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    whole = server.post("/api/chat", {**asked, "stream": False}).json()
    streamed = lines(server.post("/api/chat", asked))
    assert whole["logprobs"] == [each for line in streamed for each in line.get("logprobs", ())]
    assert (whole["logprobs"][0]["logprob"], len(whole["logprobs"][0]["top_logprobs"])) == (-1.5, 2)


@pytest.mark.parametrize(
    "format", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}]
)
def test_a_format_is_a_grammar(server: Server, format: Any) -> None:
    assert server.post("/api/chat", {"messages": USER, "format": format}).status_code == 200
    grammar = server.mesh.prompts[-1].params.grammar
    assert grammar is not None
    assert ("integer" in grammar) == (format != "json")


def test_tool_calls_are_whole_objects(talking_server: Server, say: Speaker) -> None:
    say(CALLS)
    asked = {"messages": USER, "tools": [WEATHER]}
    found = [
        call["function"]
        for line in lines(talking_server.post("/api/chat", asked))
        for call in line["message"].get("tool_calls", ())
    ]
    assert found == [
        {"index": 0, "name": "weather", "arguments": {"city": "Ulm", "days": 2}},
        {"index": 1, "name": "now", "arguments": {}},
    ]
    say(CALLS)
    whole = talking_server.post("/api/chat", {**asked, "stream": False}).json()
    assert [each["function"] for each in whole["message"]["tool_calls"]] == found


def test_arguments_of_several_lines_stay_one_line(talking_server: Server, say: Speaker) -> None:
    say('<tool_call>\n{"name": "weather", "arguments": {\n"city": "Ulm"\n}}\n</tool_call>')
    *_, line, _ = lines(talking_server.post("/api/chat", {"messages": USER, "tools": [WEATHER]}))
    assert line["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Ulm"}


def test_results_of_tools_need_no_ids(talking_server: Server, say: Speaker) -> None:
    say("fine")
    calls = [{"function": {"name": name, "arguments": {"city": name}}} for name in ("now", "weather")]
    messages = [
        *USER,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
        {"role": "tool", "tool_name": "now", "content": "noon"},
    ]
    assert talking_server.post("/api/chat", {"messages": messages, "stream": False}).status_code == 200
    assert "(hm)CALL now:nowCALL weather:weather<tool>rain[call_1_1]<tool>noon[call_1_0]" in say.last_prompt


def test_thinking_stands_apart(talking_server: Server, say: Speaker) -> None:
    bodies: dict[str, Any] = {"/api/chat": {"messages": USER}, "/api/generate": {"prompt": "Hello"}}
    for path, body in bodies.items():
        say(THOUGHT + "the answer")
        whole = talking_server.post(path, {**body, "think": True, "stream": False}).json()
        turn = whole.get("message", whole)
        assert turn["thinking"].strip() == "the dog 🙂"
        assert (turn.get("content") or turn.get("response")) == "the answer"
        assert "THINKING True" in say.last_prompt
        say(THOUGHT + "the answer")
        parts = [
            line.get("message", line) for line in lines(talking_server.post(path, {**body, "think": "low"}))
        ]
        assert "".join(each.get("thinking", "") for each in parts) == turn["thinking"]
        say(THOUGHT + "the answer")
        without = talking_server.post(path, {**body, "think": False, "stream": False}).json()
        assert "thinking" not in without.get("message", without)
        assert "THINKING False" in say.last_prompt


def test_models(server: Server, talking_server: Server) -> None:
    tags = server.client.get("/api/tags").json()["models"]
    assert [each["name"] for each in tags] == ["tiny", "other/name"]
    assert tags[0].keys() >= {"model", "modified_at", "size", "digest", "details"}
    (loaded, _) = server.client.get("/api/ps").json()["models"]
    assert (loaded["context_length"], loaded["size_vram"]) == (256, 0)
    assert server.client.get("/api/version").json()["version"].count(".") == 2
    shown = server.post("/api/show", {"model": "tiny:latest"}).json()
    assert shown["capabilities"] == ["completion"]
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 256
    assert "message" in shown["template"]
    shown = talking_server.post("/api/show", {"name": "tiny"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert "nobody" in refused(server.post("/api/show", {"model": "nobody"}), 404)


def test_an_empty_request_loads_nothing(server: Server) -> None:
    num_prompts = len(server.mesh.prompts)
    assert server.post("/api/chat", {"model": "tiny"}).json()["done_reason"] == "load"
    answer = server.post("/api/generate", {"model": "tiny", "keep_alive": 0}).json()
    assert (answer["response"], answer["done"], answer["done_reason"]) == ("", True, "unload")
    assert "nobody" in refused(server.post("/api/generate", {"model": "nobody"}), 404)
    assert len(server.mesh.prompts) == num_prompts


CHAT, GENERATE = "/api/chat", "/api/generate"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["AA"]}]}, "messages[0].images[0] is of type"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": "AA"}]}, "messages[0].images must be a list"),
        (GENERATE, {"prompt": "x", "images": ["AA"]}, "images[0] is of type"),
        (GENERATE, {"prompt": "x", "raw": True, "images": ["AA"]}, "raw leaves out the chat template"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "--chat-template"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix"),
        (GENERATE, {"prompt": "x", "context": [1]}, "/api/chat"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "raw"),
        (CHAT, {"messages": USER, "options": {"num_ctx": 257}}, "options.num_ctx"),
        (CHAT, {"messages": USER, "options": {"num_ctx": "big"}}, "$.options.num_ctx"),
        (CHAT, {"messages": USER, "options": {"num_predict": 257}}, "257 in the completion"),
        (CHAT, {"messages": USER, "options": {"num_predict": 0}}, "at least one token"),
        (CHAT, {"messages": USER, "options": {"mirostat": 2}}, "options.mirostat"),
        (CHAT, {"messages": USER, "options": {"repeat_penalty": 2, "repeat_last_n": 64}}, "repeat_last_n"),
        (CHAT, {"messages": USER, "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        (CHAT, {"messages": USER, "options": {"temperature": -1}}, "temperature"),
        (CHAT, {"messages": USER, "format": "xml"}, "format"),
        (CHAT, {"messages": USER, "format": {"type": 7}}, "format"),
        (CHAT, {"messages": USER, "think": True}, "does not support thinking"),
        (CHAT, {"messages": USER, "think": "much"}, "think"),
        (CHAT, {"messages": USER, "tools": [WEATHER]}, "--enable-auto-tool-choice"),
        (CHAT, {"messages": [{"role": "user", "content": [1]}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        (CHAT, {"messages": "x"}, "$.messages"),
        ("/api/show", {}, "model"),
        ("/api/pull", {"model": "tiny"}, "download models"),
        ("/api/create", {"model": "tiny"}, "create models"),
    ],
)  # fmt: skip
def test_what_is_refused(server: Server, path: str, body: Any, words: str) -> None:
    assert words in refused(server.post(path, body))


def test_errors_have_ollamas_shape(server: Server) -> None:
    assert "nobody" in refused(server.post(CHAT, {"model": "nobody", "messages": USER}), 404)
    assert "/api/nothing" in refused(server.post("/api/nothing", {}), 404)
    assert "delete models" in refused(server.client.request("DELETE", "/api/delete", json={"model": "x"}))
    assert "not valid JSON" in refused(server.client.post(CHAT, content=b"{"))


def test_a_stream_that_fails_ends_with_an_error(server: Server) -> None:
    server.mesh.reset(failing("gone", after=[70, 71]))
    first, *_, last = lines(server.post(CHAT, {"messages": USER}))
    assert first["message"]["content"]
    assert last == {"error": "gone"}


def test_curl_needs_no_content_type_but_pages_do(server: Server) -> None:
    """``curl -d`` names a form."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": "tiny", "messages": USER})
    assert len(lines(server.client.post(CHAT, content=body, headers=form))) > 1
    page = server.client.post(CHAT, content=body, headers={**form, "origin": "http://evil.example"})
    assert "JSON" in refused(page)


def test_a_capsule_is_in_the_last_line(server: Server) -> None:
    answer = server.client.post(CHAT, json={"messages": USER}, headers={"x-lockstep-capsule": "1"})
    *_, last = lines(answer)
    assert last["done"]
    assert last["lockstep_capsule"]["format"]
