"""Requests that make no sense: a clear answer that names the field."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx2
import pytest

from tests.router.conftest import JSON, MAX_MODEL_LEN, VOCAB_SIZE, Server

USER = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
BAD_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "strng"}}}},
}


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(350):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


def refused(answer: httpx2.Response, message: str, param: str | None = None) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param


COMMON: list[tuple[dict[str, Any], str, str]] = [
    ({"max_output_tokens": 5}, "max_output_tokens is not supported: use max_tokens", "max_output_tokens"),
    ({"stop_sequences": ["a"]}, "stop_sequences is not supported: use stop.", "stop_sequences"),
    ({"max_tokens": "5"}, "Expected `int | null`, got `str`", "max_tokens"),
    ({"max_tokens": 1.5}, "Expected `int | null`, got `float`", "max_tokens"),
    ({"max_tokens": True}, "got `bool`", "max_tokens"),
    ({"max_tokens": -1}, "max_tokens must be at least 0", "max_tokens"),
    ({"max_tokens": 2**70}, "Expected `int` <= 9223372036854775807", "max_tokens"),
    ({"max_tokens": 2**62}, f"maximum context length is {MAX_MODEL_LEN} tokens", ""),
    (
        {"max_tokens": MAX_MODEL_LEN},
        f"maximum context length is {MAX_MODEL_LEN} tokens. However, you requested",
        "",
    ),
    ({"min_tokens": -1}, "min_tokens must be at least 0", "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "must not exceed max_tokens (4)", "min_tokens"),
    ({"min_tokens": 1000}, "must not exceed max_tokens", "min_tokens"),
    ({"temperature": -0.1}, "temperature must be a finite number", "temperature"),
    ({"temperature": "hot"}, "Expected `float | null`, got `str`", "temperature"),
    ({"top_p": 0}, "top_p must be in (0, 1]", "top_p"),
    ({"top_p": 1.1}, "top_p must be in (0, 1]", "top_p"),
    ({"top_k": -2}, "top_k must be", "top_k"),
    ({"min_p": 2}, "min_p must be", "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty must be", "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty must be", "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty must be above 0", "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "must be above 0 and finite (1e-06 to 1e+06)", "repetition_penalty"),
    ({"n": 0}, "n must be between 1 and", "n"),
    ({"n": 1000}, "n must be between 1 and", "n"),
    ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0", "n"),
    ({"seed": 2**63}, "Expected `int` <= 9223372036854775807", "seed"),
    ({"seed": -(2**63) - 1}, "Expected `int` >= -9223372036854775808", "seed"),
    ({"seed": 0.5}, "got `float`", "seed"),
    ({"timeout": 0}, "timeout must be above 0", "timeout"),
    ({"timeout": -1.5}, "timeout must be above 0", "timeout"),
    ({"timeout": 1e9}, "at most 604800 seconds", "timeout"),
    ({"stop": ""}, "stop strings must not be empty", "stop"),
    ({"stop": ["a", ""]}, "stop strings must not be empty", "stop"),
    ({"stop": ["a"] * 100}, "at most 64 stop strings", "stop"),
    ({"stop": ["a" * 5000] * 2}, "at most 8000 characters together", "stop"),
    ({"stop": [1]}, "Expected `str`, got `int`", "stop"),
    (
        {"stop_token_ids": [VOCAB_SIZE]},
        f"names token {VOCAB_SIZE}, but the vocabulary has {VOCAB_SIZE} tokens",
        "stop_token_ids",
    ),
    ({"stop_token_ids": [-1]}, "names token -1", "stop_token_ids"),
    ({"logit_bias": {"x": 1, "7": 1, "1.5": 2}}, "token ids as its keys, got 'x', '1.5'.", "logit_bias"),
    ({"logit_bias": {"x" * 50 + str(i): 1 for i in range(10)}}, "xxx' and 2 more", "logit_bias"),
    ({"logit_bias": {"7": "x"}}, "Expected `float`, got `str`", "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, f"names token {VOCAB_SIZE}", "logit_bias"),
    ({"logit_bias": {"7": 100.5}}, "logit_bias values must be between -100 and 100, got 100.5", "logit_bias"),
    ({"logit_bias": {"7": 1, "8": -1e300}}, "must be between -100 and 100, got -1e+300", "logit_bias"),
    ({"logit_bias": {"9" * 30: 1}}, "must have token ids as its keys", "logit_bias"),
    (
        {"prompt_logprobs": -1},
        "prompt_logprobs -1 asks for all 512 tokens, --max-logprobs allows 20 (-1: all)",
        "prompt_logprobs",
    ),
    ({"allowed_token_ids": []}, "must not be empty", "allowed_token_ids"),
    ({"allowed_token_ids": [2**40]}, "names token", "allowed_token_ids"),
    ({"allowed_token_ids": [5] * (VOCAB_SIZE + 1)}, "names more than the", "allowed_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs must be between 0 and 20", "prompt_logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs must be between 0 and 20", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "not available with stream", "prompt_logprobs"),
    ({"stream": "yes"}, "Expected `bool | null`", "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options needs stream", "stream_options"),
    ({"stream_options": {"include_usage": False}}, "stream_options needs stream", "stream_options"),
    ({"stream_options": [], "stream": True}, "Expected `object | null`", "stream_options"),
    ({"truncate_prompt_tokens": 0}, "The prompt is empty", ""),
    ({"truncate_prompt_tokens": -1, "max_tokens": MAX_MODEL_LEN}, "However, you requested", ""),
    ({"truncate_prompt_tokens": -2}, "must be -1 or more", "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 9999}, "exceeds the context length", "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "must be 'left' or 'right'", "truncation_side"),
    ({"request_id": "a\nb"}, "request_id must be printable", "request_id"),
    ({"request_id": "é"}, "request_id must be printable", "request_id"),
    ({"request_id": "a" * 300}, "request_id must be printable", "request_id"),
    ({"request_id": ""}, "request_id must be printable", "request_id"),
    ({"cache_salt": ""}, "cache_salt must have 1 to", "cache_salt"),
    ({"priority": "high"}, "got `str`", "priority"),
    ({"response_format": {"type": "xml"}}, "structural_tag, got 'xml'", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "needs json_schema", "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "needs json_schema", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}}},
        "Invalid type: strng",
        "response_format",
    ),
    ({"response_format": "json"}, "must be an object with a type", "response_format"),
    (
        {"structured_outputs": {"regex": "(["}},
        "unclosed character class",
        "structured_outputs",
    ),
    ({"structured_outputs": {}}, "needs one of json, json_object, regex", "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "Expected `str | null`", "structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "the regular expression is empty", "structured_outputs"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "look-ahead", "structured_outputs"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"not": {"type": "null"}}, "strict": True},
            }
        },
        "response_format: $.not cannot be enforced, and the schema is strict",
        "response_format",
    ),
    ({"structured_outputs": {"json": "{"}}, "the schema is not valid JSON", "structured_outputs"),
    ({"structured_outputs": {"json": False}}, "no answer can follow the schema false", "structured_outputs"),
    (
        {"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 1}}},
        "minimum (5) is greater than maximum (1)",
        "structured_outputs",
    ),
    ({"structured_outputs": {"json": {"$ref": "http://x/y"}}}, "does not fetch", "structured_outputs"),
    ({"structured_outputs": {"json": DEEP}}, "the schema is nested too deeply", "structured_outputs"),
    (
        {"structured_outputs": {"json": DEEP, "disable_additional_properties": True}},
        "the schema is nested too deeply",
        "structured_outputs",
    ),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": DEEP, "end": "</a>"}],
                "triggers": ["<a>"],
            }
        },
        "the structural tag is nested too deeply",
        "response_format",
    ),
    ({"structured_outputs": {"choice": []}}, "choice must not be empty", "structured_outputs"),
    ({"structured_outputs": {"choice": [1]}}, "Expected `str`", "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: b"}}, 'unknown name: "b"', "structured_outputs"),
    ({"structured_outputs": {"grammar": "??"}}, "the grammar cannot be read", "structured_outputs"),
    ({"structured_outputs": {"structural_tag": {}}}, "needs structures and triggers", "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "has regex and choice", "structured_outputs"),
    ({"guided_regex": "("}, "unclosed group", "guided_regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "exclude each other", "guided_choice"),
    (
        {"response_format": {"type": "json_object"}, "guided_json": {}},
        "response_format and guided_json exclude each other",
        "guided_json",
    ),
    ({"use_beam_search": True}, "use_beam_search is not supported yet", "use_beam_search"),
    ({"bad_words": ["x", " "]}, "bad_words must not be empty", "bad_words"),
    ({"bad_words": ["x"] * 600}, "bad_words may be 512 words", "bad_words"),
    ({"bad_words": ["x" * 9000]}, "of 8000 characters together", "bad_words"),
    ({"bad_words": "x"}, "Expected `array | null`", "bad_words"),
    ({"packed_top_logprobs": True}, "packed_top_logprobs is not supported: ask", "packed_top_logprobs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids is not supported yet", "logprob_token_ids"),
    ({"thinking_token_budget": -2}, "must be at least 0, or -1 for none", "thinking_token_budget"),
    ({"thinking_token_budget": True}, "got `bool`", "thinking_token_budget"),
    ({"thinking_token_budget": 0}, "thinking_token_budget ", "thinking_token_budget"),
    ({"custom_logit_processor": "x"}, "is not supported yet", "custom_logit_processor"),
    ({"stop_regex": "a+"}, "stop_regex is not supported: use stop, or", "stop_regex"),
    ({"no_stop_trim": True}, "not supported: use include_stop_str_in_output", "no_stop_trim"),
    ({"min_new_tokens": 5}, "not supported: use min_tokens", "min_new_tokens"),
    ({"input_ids": [1], "prompt": None}, "send token ids as the prompt", "input_ids"),
    ({"lora_path": "a"}, "lora_path is not supported yet", "lora_path"),
    ({"return_hidden_states": True}, "return_hidden_states is not supported yet", "return_hidden_states"),
    ({"best_of": 3}, "best_of is not supported: ask for n", "best_of"),
    ({"regex": "(", "best_of": 1}, "unclosed group", "regex"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "exclude each other", "ebnf"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params is not supported yet", "kv_transfer_params"),
    ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params is not supported yet", "ec_transfer_params"),
    ({"watermarking": True}, "watermarking is not supported yet", "watermarking"),
    ({"return_prompt_text": True}, "not supported: ask for return_token_ids", "return_prompt_text"),
    ({"moderation": {"model": "m"}}, "moderation is not supported: nothing here", "moderation"),
    ({"session_params": {"id": "a"}}, "not supported: send the whole conversation", "session_params"),
    ({"data_parallel_rank": -1}, "Expected `int` >= 0", "data_parallel_rank"),
    ({"data_parallel_rank": 1, "routed_dp_rank": 0}, "name several instances", "data_parallel_rank"),
    (
        {"response_format": {"type": "json_object", "schema": False}},
        "no answer can follow",
        "response_format",
    ),
    ({"response_format": {"type": "json_object", "schema": 5}}, "must be a JSON object", "response_format"),
    ({"model": 7}, "Expected `str | null`", "model"),
]

COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt is required", "prompt"),
    ({"max_completion_tokens": -5}, "max_completion_tokens must be at least 0", "max_completion_tokens"),
    ({"top_logprobs": 3}, "top_logprobs is for chats: use logprobs", "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools are for chats", "tools"),
    ({"prompt": ""}, "The prompt is empty", "prompt"),
    ({"prompt": []}, "The prompt is empty", "prompt"),
    ({"prompt": [[]]}, "The prompt is empty", "prompt"),
    ({"prompt": ["a", ""]}, "The prompt is empty", "prompt"),
    ({"prompt": 5}, "Expected `str | array | null`", "prompt"),
    ({"prompt": {}}, "Expected `str | array | null`", "prompt"),
    ({"prompt": [1.5]}, "got `float`", "prompt"),
    ({"prompt": [None]}, "got `null`", "prompt"),
    ({"prompt": [1, "a"]}, "must not mix token ids", "prompt"),
    ({"prompt": ["a", [1]]}, "must not mix texts with lists", "prompt"),
    ({"prompt": ["a"] * 2000}, "at most 1024 prompts", "prompt"),
    ({"prompt": [VOCAB_SIZE]}, f"Token id {VOCAB_SIZE} is out of vocabulary", "prompt"),
    ({"prompt": [[5], [-1]]}, "Token id -1 is out of vocabulary", "prompt"),
    ({"prompt": [2**64]}, "Expected `int` <=", "prompt"),
    ({"prompt": [5] * MAX_MODEL_LEN}, f"you requested {MAX_MODEL_LEN + 1} tokens", "prompt"),
    ({"prompt": "word " * 200}, f"maximum context length is {MAX_MODEL_LEN}", "prompt"),
    ({"prompt": "word " * 20_000}, "However, you requested at least", "prompt"),
    ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21", "logprobs"),
    ({"logprobs": -1}, "logprobs -1 asks for all 512 tokens", "logprobs"),
    ({"logprobs": True}, "got `bool`", "logprobs"),
    ({"max_tokens": 0}, "max_tokens must be at least 1", "max_tokens"),
    ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "must not exceed max_tokens (0)", "min_tokens"),
    ({"suffix": "end"}, "suffix is not supported yet", "suffix"),
    ({"prompt": None, "prompt_embeds": "AAAA"}, "prompt_embeds is not supported yet", "prompt_embeds"),
]

CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"return_routed_experts": True}, "is not supported in chats", "return_routed_experts"),
    ({"messages": None}, "Expected `array`, got `null`", "messages"),
    ({"messages": []}, "messages must not be empty", "messages"),
    ({"messages": "hi"}, "Expected `array`", "messages"),
    ({"messages": USER * 300}, "more messages than the model's context can hold", "messages"),
    ({"messages": [{"role": "user", "content": "a" * 9000}]}, "you requested at least", "messages"),
    ({"messages": ["hi"]}, "Expected `object`", "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role must be a string", "messages"),
    ({"messages": [{"role": 1, "content": "hi"}]}, "messages[0].role must be a string", "messages"),
    ({"messages": [{"role": "user", "content": 1}]}, "must be a string or a list of parts", "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0] is of type 'image_url', but this model takes text only",
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]},
        "has a part without a type",
        "messages",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "tool_calls must be a list", "messages"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
        "messages[0].tool_calls[0].function must be an object with a name",
        "messages",
    ),
    ({"max_tokens": 0}, "at least one token", "max_tokens"),
    ({"max_completion_tokens": 0, "max_tokens": 5}, "at least one token", "max_completion_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens must be at least 0", "max_completion_tokens"),
    ({"logprobs": 1}, "Expected `bool | null`", "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs", "top_logprobs"),
    ({"top_logprobs": 2, "logprobs": False}, "top_logprobs needs logprobs", "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs must be between 0 and 20", "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs -1 asks for all 512 tokens", "top_logprobs"),
    ({"top_logprobs": -2, "logprobs": True}, "between 0 and 20", "top_logprobs"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "exclude each other",
        "continue_final_message",
    ),
    ({"modalities": ["text", "audio"]}, "modalities other than text are not supported", "modalities"),
    ({"audio": {"voice": "a"}}, "audio is not supported: answers are text", "audio"),
    ({"web_search_options": {}}, "web_search_options is not supported: offer a tool", "web_search_options"),
    ({"prompt_token_ids": [1]}, "send token ids as the prompt of /v1/completions", "prompt_token_ids"),
    ({"functions": [{"name": "f"}]}, "functions is not supported: name them in tools", "functions"),
    ({"function_call": {"name": "f"}}, "function_call is not supported: use tool_choice", "function_call"),
    ({"separate_reasoning": False}, "join reasoning and content", "separate_reasoning"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages[0].function_call is not supported: use tool_calls",
        "messages",
    ),
    (
        {"messages": [{"role": "function", "name": "f", "content": "x"}]},
        "messages[0].role function is not supported: use tool",
        "messages",
    ),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading is not supported", "tools"),
    ({"tools": [{}]}, "tools[0].function must be an object with a name", "tools"),
    ({"tools": [TOOL | {"type": "web_search"}]}, "tools[0].type must be 'function'", "tools"),
    (
        {"tools": [{"function": {"name": "f", "parameters": [1]}}]},
        "parameters must be a JSON schema",
        "tools",
    ),
    ({"tools": [TOOL]}, "requires --enable-auto-tool-choice", "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
    (
        {"tools": [BAD_TOOL], "tool_choice": "required"},
        "tools[0] ('f'): $.properties.a: Invalid type: strng",
        "tools",
    ),
    (
        {"tools": [{"function": {"name": "f", "parameters": DEEP}}], "tool_choice": "required"},
        "tools: the schema of the function 'f' is nested too deeply",
        "tools",
    ),
    (
        {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "structured_outputs and tool_choice exclude each other",
        "tool_choice",
    ),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "must be none, auto, required", "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "names no function of tools",
        "tool_choice",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
        "tool_choice of type allowed_tools needs a list of tools",
        "tool_choice",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [TOOL]}}},
        "tool_choice of type allowed_tools needs a mode, auto or required",
        "tool_choice",
    ),
    (
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [TOOL, {"function": {"name": "g"}}]},
            },
        },
        "tool_choice: allowed tool 1 names no function of tools",
        "tool_choice",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
        "tool_choice of type 'custom' is not supported, only function",
        "tool_choice",
    ),
    ({"tools": [TOOL], "tool_choice": {"function": 1}}, "names no function of tools", "tool_choice"),
    ({"chat_template": "x"}, "chat_template is not supported: give", "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "must not set messages", "messages"),
    ({"chat_template_kwargs": []}, "Expected `object | null`", "chat_template_kwargs"),
]


def shown(table: list[tuple[dict[str, Any], str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("fields", "message", "param"), table, ids=[json.dumps(fields)[:50] for fields, _, _ in table]
    )


@shown([*COMMON, *COMPLETIONS])
def test_bad_completions(server: Server, fields: dict[str, Any], message: str, param: str) -> None:
    answer = server.post("/v1/completions", {"prompt": "Hello"} | fields)
    refused(answer, message, param or None)
    assert server.mesh.generations == []


@shown([*COMMON, *CHATS])
def test_bad_chats(server: Server, fields: dict[str, Any], message: str, param: str) -> None:
    answer = server.post("/v1/chat/completions", {"messages": USER} | fields)
    refused(answer, message, param or None)
    assert server.mesh.generations == []


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "either prompt or messages"),
        ("/tokenize", {"prompt": ["a"]}, "Expected `str | null`"),
        ("/tokenize", {"messages": [{}]}, "role must be a string"),
        ("/detokenize", {}, "missing required field `tokens`"),
        ("/detokenize", {"tokens": "a"}, "Expected `array`"),
        ("/detokenize", {"tokens": [-1]}, "out of vocabulary"),
        ("/detokenize", {"tokens": [2**33]}, "out of vocabulary"),
        ("/v1/chat/completions", {"model": "tiny"}, "missing required field `messages`"),
        ("/v1/completions", {"model": "tiny"}, "prompt is required"),
    ],
)
def test_bad_bodies(server: Server, path: str, body: Any, message: str) -> None:
    refused(server.post(path, body), message)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"prompt=a", "not valid JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b'"text"', "Expected `object`, got `str`"),
        (b'{"prompt": "a"} x', ""),
        (b'{"prompt": "\xff"}', ""),
        (b'{"model": "\xff"}', "byte 11 (0xff) is not UTF-8: invalid start byte"),
        (b'{"x": "a", "model": "ab\xe2\x82"}', "byte 23 (0xe2) is not UTF-8"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair stands alone (byte 12)"),
        (b'{"prompt": "a', "truncated"),
        (b'{"x": ' + b"[" * 50_000, ""),
        (b'{"x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested too deeply"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "not valid JSON"),
        (b"\x00" * 50, "not valid JSON"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_no_json(server: Server, path: str, body: bytes, message: str) -> None:
    refused(server.client.post(path, content=body, headers=JSON), message)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400])
def test_numbers_that_are_none(server: Server, number: str) -> None:
    body = f'{{"prompt": "a", "temperature": {number}}}'.encode()
    refused(server.client.post("/v1/completions", content=body, headers=JSON), "")


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; a=b", ""]
)
def test_other_content_types(server: Server, kind: str) -> None:
    answer = server.client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind})
    refused(answer, "must be JSON", "Content-Type")


@pytest.mark.parametrize(
    "page",
    [
        {"origin": "https://site.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_web_page_must_say_that_it_is_json(server: Server, page: dict[str, str]) -> None:
    """It may send bytes without a type anywhere, and no browser asks first."""
    body = b'{"prompt": "a"}'
    refused(server.client.post("/v1/completions", content=body, headers=page), "must say", "Content-Type")
    assert not server.mesh.generations
    assert server.client.post("/v1/completions", content=body, headers=page | JSON).status_code == 200


def test_content_types_that_are_json(server: Server) -> None:
    for headers in (
        {},
        {"content-type": "Application/JSON; charset=utf-8"},
        {"content-type": "application/x+json"},
    ):
        answer = server.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
        assert answer.status_code == 200


def test_compressed_bodies(server: Server) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = server.client.post("/v1/completions", content=gzip.compress(body), headers=headers)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("UnsupportedMediaTypeError", "Content-Encoding")
    assert error["message"].startswith("Compressed bodies are not read (Content-Encoding: gzip)")
    plain = headers | {"content-encoding": "identity"}
    assert server.client.post("/v1/completions", content=body, headers=plain).status_code == 200


@pytest.mark.parametrize("rank", ["x", "-1", "1.5", "²", "9" * 50])
def test_bad_ranks(server: Server, rank: str) -> None:
    headers = {"x-data-parallel-rank": rank.encode()}
    answer = server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)  # type: ignore[arg-type]
    refused(answer, "must be a whole number", "X-data-parallel-rank")


def test_bad_request_ids(server: Server) -> None:
    for id in (b"\xff", b"a" * 300):
        headers = {"x-request-id": id}
        answer = server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)  # type: ignore[arg-type]
        refused(answer, "X-Request-Id must be", "X-Request-Id")


@pytest.mark.parametrize(
    "name", ["x-request-id", "x-data-parallel-rank", "x-request-timeout", "x-session-id", "traceparent"]
)
def test_a_header_without_a_value_is_none(server: Server, name: str) -> None:
    answer = server.client.post("/v1/completions", json={"prompt": "a"}, headers={name: ""})
    assert answer.status_code == 200, answer.text
    assert server.mesh.prompts[-1].rank is None
    assert server.mesh.prompts[-1].session == ""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_other_models(server: Server, path: str) -> None:
    body = {"model": "gpt-x", "prompt": "a", "messages": USER, "tokens": []}
    answer = server.post(path, body)
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "The model `gpt-x` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
