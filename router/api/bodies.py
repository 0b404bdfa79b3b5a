"""Readers of request bodies: each gives the chat or completion asked for (pure).

Every API but these two is a translation to one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from router.api.anthropic_messages.request import chat_request
from router.api.anthropic_messages.wire import CountTokensRequest, MessagesRequest
from router.api.native_generation import NativeRequest
from router.api.native_generation import as_completion as native_completion
from router.api.ollama.handlers import read_ollama_chat, read_ollama_generate
from router.api.ollama.request import as_chat, as_generation
from router.api.responses.request import translated
from router.api.responses.wire import ResponsesRequest
from router.api.token_generation import GenerateRequest, as_completion
from router.errors import refuse
from router.http.body import decoder
from router.mesh import ServedModel
from router.openai_api import ChatRequest, CompletionRequest

NULL = msgspec.Raw(b"null")


class Invocation(msgspec.Struct):
    """Fields that distinguish a chat from a completion."""

    messages: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL


_read_invocation = decoder(Invocation)
read_completion = decoder(CompletionRequest)
read_chat = decoder(ChatRequest)
read_generate = decoder(GenerateRequest)
read_native = decoder(NativeRequest)
read_responses = decoder(ResponsesRequest)
read_messages = decoder(MessagesRequest)
read_count_tokens = decoder(CountTokensRequest)


def read_invocation(body: bytes) -> ChatRequest | CompletionRequest:
    """A chat or a completion, by the fields given.

    Raises:
        ApiError: it is none, or both.
    """
    given = _read_invocation(body)
    if (given.messages == NULL) == (given.prompt == NULL):
        refuse("/invocations needs messages, for a chat, or prompt, for a completion.", "messages")
    return read_completion(body) if given.messages == NULL else read_chat(body)


READERS: Mapping[str, Callable[[bytes, ServedModel], ChatRequest | CompletionRequest]] = {
    "/v1/completions": lambda body, _: read_completion(body),
    "/v1/chat/completions": lambda body, _: read_chat(body),
    "/v1/responses": lambda body, _: translated(read_responses(body)).chat,
    "/v1/messages": lambda body, _: chat_request(read_messages(body)),
    "/inference/v1/generate": lambda body, served: as_completion(read_generate(body), served.max_model_len),
    "/generate": lambda body, served: native_completion(read_native(body), served.max_model_len),
    "/api/chat": lambda body, served: as_chat(read_ollama_chat(body), served),
    "/api/generate": lambda body, served: as_generation(read_ollama_generate(body), served),
    "/invocations": lambda body, _: read_invocation(body),
}
"""How a body is read, by the path of its endpoint."""
