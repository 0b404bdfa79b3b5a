"""Reads requests as far as the choice of an instance depends on them.

Prompts are made by the same functions as in a router, so the blocks of their prefixes have the same names. A
request that a router would refuse is read as none: the router answers it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request

from engine.sampling import SamplingParams
from router.api import token_generation
from router.api.anthropic_messages.request import chat_request
from router.api.anthropic_messages.wire import MessagesRequest
from router.api.generating import NULL, Invocation
from router.api.headers import pinned_rank, session
from router.api.prompts import PromptText, chat_prompt, completion_prompts
from router.api.responses.request import translated
from router.api.responses.wire import ResponsesRequest
from router.api.token_generation import GenerateRequest
from router.api.validation import (
    check_chat,
    check_completion,
    keep_allowed_tools,
    keep_tools_out,
    wanted_tokens,
)
from router.config import HttpConfig
from router.errors import ApiError
from router.http.body import decoder
from router.http.heavy import run_sized
from router.http.request_path import without_prefix
from router.mesh import Prompt
from router.openai_api import ChatRequest, CompletionRequest, GenerationRequest
from router.text.text_models import TextModels

_read_invocation = decoder(Invocation)
_read_completion = decoder(CompletionRequest)
_read_chat = decoder(ChatRequest)
_read_generate = decoder(GenerateRequest)
_read_responses = decoder(ResponsesRequest)
_read_messages = decoder(MessagesRequest)

Read = tuple[GenerationRequest, list[PromptText]]


class PromptReader:
    """Reads bodies of the endpoints that generate."""

    def __init__(self, models: TextModels, config: HttpConfig) -> None:
        self._models = models
        self._config = config
        self._readers: dict[str, Callable[[bytes], Awaitable[Read]]] = {
            "/v1/completions": lambda body: self._completion(body, _read_completion),
            "/v1/chat/completions": lambda body: self._chat(body, _read_chat),
            "/v1/responses": lambda body: self._chat(body, lambda it: translated(_read_responses(it)).chat),
            "/v1/messages": lambda body: self._chat(body, lambda it: chat_request(_read_messages(it))),
            "/inference/v1/generate": self._tokens,
            "/invocations": self._invocation,
        }

    def __repr__(self) -> str:
        return f"<PromptReader with {self._models!r}>"

    async def read(self, headers: Mapping[str, str], body: bytes) -> Prompt | None:
        """The request for a choice; None where the router that gets it chooses by itself.

        That is where it is none that generates, names its instance, or has several samples.
        """
        path = without_prefix(headers.get(":path", "").partition("?")[0], self._config.root_path)
        reader = self._readers.get(path)
        if reader is None or not body:
            return None
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        request = Request({"type": "http", "headers": encoded})
        try:
            wanted, prompts = await reader(body)
            if len(prompts) != 1 or (wanted.n or 1) != 1 or pinned_rank(request, wanted) is not None:
                return None
            key = session(request, wanted)
        except ApiError:
            return None
        return Prompt(
            request_id=headers.get("x-request-id", ""),
            prompt_ids=prompts[0].ids,
            params=SamplingParams(prompt_logprobs=wanted.prompt_logprobs),
            seed=0,
            asked=max(0, wanted_tokens(wanted) or 0),
            cache_salt=wanted.cache_salt or "",
            session=key,
        )

    async def _completion(self, body: bytes, read: Callable[[bytes], CompletionRequest]) -> Read:
        wanted = await run_sized(lambda: read(body), len(body))
        check_completion(wanted)
        model = await self._models.get(wanted.model)
        return wanted, await run_sized(lambda: completion_prompts(wanted, model), len(body))

    async def _chat(self, body: bytes, read: Callable[[bytes], ChatRequest]) -> Read:
        wanted = await run_sized(lambda: check_chat(read(body)), len(body))
        model = await self._models.get(wanted.model)
        keep_allowed_tools(wanted)
        keep_tools_out(wanted, self._config)
        return wanted, [await run_sized(lambda: chat_prompt(wanted, model), len(body))]

    async def _tokens(self, body: bytes) -> Read:
        asked = await run_sized(lambda: _read_generate(body), len(body))
        model = await self._models.get(asked.model)
        wanted = token_generation.as_completion(asked, model.served.max_model_len)
        return await self._completion(body, lambda _: wanted)

    async def _invocation(self, body: bytes) -> Read:
        given = await run_sized(lambda: _read_invocation(body), len(body))
        if given.messages == NULL:
            return await self._completion(body, _read_completion)
        return await self._chat(body, _read_chat)
