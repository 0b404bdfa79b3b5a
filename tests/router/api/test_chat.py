"""Chat completions with the real OpenAI client: a real server, a scripted mesh."""

from __future__ import annotations

from typing import Any

import openai

from engine.messages import Delta, FinishReason
from router.text.tokens import Tokenizer
from tests.router.conftest import Server, events, ids_of
from tests.router.fake_mesh import saying
from tests.router.tiny_tokenizer import EOS

USER: list[Any] = [{"role": "user", "content": "Hello"}]


def test_chat(client: openai.OpenAI, server: Server, tokenizer: Tokenizer) -> None:
    ids = [*ids_of(tokenizer, "Fine, thanks"), EOS]
    server.mesh.script = saying(ids, FinishReason.STOP)
    answer = client.chat.completions.create(model="tiny", messages=USER)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Fine, thanks")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids)


def test_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model="tiny", messages=USER, stream=True, n=2, temperature=1)
    )
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert all(choice.delta.role is None for choice in own[1:])
        assert "".join(choice.delta.content or "" for choice in own) == " Hello world!"
        assert [choice.finish_reason for choice in own] == [*[None] * (len(own) - 1), "length"]


def test_chat_logprobs(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert bytes(byte for entry in logprobs.content for byte in entry.bytes or []) == b" Hello world!"
    entry = logprobs.content[0]
    first = ids_of(tokenizer, " Hello world!")[0]
    assert (entry.token, entry.logprob) == (tokenizer.token_text(first), -1.5)
    assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5]
    assert entry.top_logprobs[0].token == tokenizer.token_text(first + 1)


def test_chat_token_ids(server: Server, tokenizer: Tokenizer) -> None:
    """vLLM has the prompt's beside the choices here, not in them."""
    body = {"messages": USER, "return_token_ids": True}
    whole = server.post("/v1/chat/completions", body).json()
    assert tokenizer.decode(whole["prompt_token_ids"]).startswith("<|im_start|>user")
    chunks = events(server.post("/v1/chat/completions", body | {"stream": True}).text)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    ids = [id for chunk in chunks for id in chunk["choices"][0].get("token_ids") or []]
    assert ids == whole["choices"][0]["token_ids"]


def test_what_is_not_told_is_null(server: Server) -> None:
    """As vLLM sends it, and only where: most chunks have no more than their text."""
    answer = server.post("/v1/chat/completions", {"messages": USER}).json()
    told = ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params", "system_fingerprint", "service_tier")
    assert [answer[name] for name in told] == [None] * 5
    (choice,) = answer["choices"]
    told = ("reasoning", "refusal", "annotations", "audio", "function_call")
    assert [choice["message"][name] for name in told] == [None] * 5
    assert (choice["token_ids"], choice["logprobs"], choice["stop_reason"]) == (None, None, None)
    first, *rest = events(server.post("/v1/chat/completions", {"messages": USER, "stream": True}).text)
    assert first["prompt_token_ids"] is None
    assert "token_ids" not in first["choices"][0]
    for chunk in rest:
        assert set(chunk) == {"object", "id", "created", "model", "choices"}
        assert chunk["choices"][0]["token_ids"] is None


def test_the_chunk_with_the_role_counts_no_token(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": USER, "stream": True, "stream_options": options, "n": 2}
    first, *_ = events(server.post("/v1/chat/completions", body).text)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["usage"]["completion_tokens"] == 0
    assert first["usage"]["total_tokens"] == first["usage"]["prompt_tokens"] > 0


def test_chat_prompt_logprobs(server: Server) -> None:
    answer = server.post("/v1/chat/completions", {"messages": USER, "prompt_logprobs": 0}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_chat_echo_prepends_the_last_message_of_the_same_role(server: Server) -> None:
    begun = [*USER, {"role": "assistant", "content": "Well,"}]
    body = {"messages": begun, "echo": True, "continue_final_message": True}
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert whole["content"] == "Well, Hello world!"
    chunks = events(server.post("/v1/chat/completions", body | {"stream": True}).text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Well, Hello world!"
    answer = server.post("/v1/chat/completions", {"messages": USER, "echo": True}).json()
    assert answer["choices"][0]["message"]["content"] == " Hello world!"


def test_stop_reasons(server: Server, tokenizer: Tokenizer) -> None:
    def ends(**fields: Any) -> tuple[Any, ...]:
        body = {"messages": USER, "max_tokens": 50} | fields
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        last = events(server.post("/v1/chat/completions", body | {"stream": True}).text)[-1]["choices"][0]
        found = (choice["finish_reason"], choice["stop_reason"])
        assert (last["finish_reason"], last["stop_reason"]) == found
        return (choice["message"]["content"], *found)

    assert ends(stop=" wor") == (" Hello", "stop", " wor")
    assert ends(stop=["x", "!"]) == (" Hello world", "stop", "!")
    ids = ids_of(tokenizer, "Hello!")
    server.mesh.script = lambda _: [Delta(1, ids, FinishReason.STOP, stop_reason=ids[-1])]
    assert ends(stop_token_ids=[ids[-1]]) == ("Hello", "stop", ids[-1])
    server.mesh.script = saying([*ids, EOS], FinishReason.STOP)
    assert ends() == ("Hello!", "stop", None)
