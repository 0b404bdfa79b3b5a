"""Handlers of the endpoints that generate: translations to chat or completion, and back.

A request is read here, then understood (:mod:`router.api.understanding`), run and answered
(:mod:`router.api.answering`). What is special of an API is how its body is read, and the class of its answer.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from router.api import native_generation, token_generation
from router.api.answering import Answering, Shape
from router.api.answers import encode, json_response
from router.api.anthropic_messages import request as messages_request
from router.api.anthropic_messages.answer import MessageAnswer
from router.api.anthropic_messages.wire import TokenCount
from router.api.bodies import (
    read_chat,
    read_completion,
    read_count_tokens,
    read_generate,
    read_invocation,
    read_messages,
    read_native,
    read_responses,
)
from router.api.chat import ChatAnswer
from router.api.completions import CompletionAnswer
from router.api.headers import key_of
from router.api.native_generation import NativeAnswer
from router.api.responses import request as responses_request
from router.api.responses.answer import ResponsesAnswer
from router.api.responses.wire import InputTokens
from router.api.stored_terms import stored_terms
from router.api.token_generation import GenerateRequest, RenderedRequest, TokensAnswer, rendered
from router.api.understanding import Understanding, Wanted
from router.config import HttpConfig
from router.errors import in_terms_of
from router.http.body import read_body
from router.http.large_bodies import run_sized
from router.http.quotas import Quotas
from router.mesh import ServedModel
from router.openai_api import ChatRequest

logger = logging.getLogger(__name__)

LEFT_OUT = "x-lockstep-left-out"
"""Response header: types of tools and items that the model did not get."""


class Generating:
    """Handlers of the endpoints that generate or count tokens."""

    def __init__(
        self, config: HttpConfig, understanding: Understanding, answering: Answering, quotas: Quotas
    ) -> None:
        self._config = config
        self._understanding = understanding
        self._answering = answering
        self._quotas = quotas

    def __repr__(self) -> str:
        return f"<Generating with {self._understanding!r}>"

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion)

    async def invocations(self, request: Request) -> Response:
        """A chat or a completion, by the fields given: the one path that SageMaker knows."""
        return await self._answer(request, read_invocation)

    async def _answer(self, request: Request, read: Callable[[bytes], Wanted]) -> Response:
        body = await self._answering.receive_body(request)
        understood = await self._understanding.understand(lambda _: read(body), len(body))
        prefix = "cmpl-"
        shape: Shape = partial(CompletionAnswer, understood)
        if isinstance(understood.wanted, ChatRequest):
            prefix, shape = "chatcmpl-", partial(ChatAnswer, understood, self._config.response_role)
        return await self._answering.answer_request(request, understood, prefix, shape)

    async def tokens(self, request: Request) -> Response:
        """``/inference/v1/generate``: token ids in and out."""
        body = await self._answering.receive_body(request)
        asked = await run_sized(lambda: read_generate(body), len(body))
        return await self._answer_tokens(request, asked, len(body))

    async def tokens_with_experts(self, request: Request) -> Response:
        """SkyRL's ``/skyrl/v1/generate``: the same with the experts of each token, never a stream."""
        body = await self._answering.receive_body(request)
        asked = await run_sized(lambda: read_generate(body), len(body))
        asked.return_routed_experts = True
        return await self._answer_tokens(request, asked, len(body))

    async def _answer_tokens(self, request: Request, asked: GenerateRequest, size: int) -> Response:
        with in_terms_of(token_generation.NAMES):
            understood = await self._understanding.understand(
                lambda served: token_generation.as_completion(asked, served.max_model_len), size
            )
            shape = partial(TokensAnswer, asked, understood)
            return await self._answering.answer_request(request, understood, "generate-tokens-", shape)

    async def render_chat(self, request: Request) -> Response:
        """The prompt of a chat in token ids, with its parameters."""
        found = await self._rendered(request, read_chat, "chatcmpl-")
        return json_response(encode(found[0]))

    async def render_completion(self, request: Request) -> Response:
        """The prompts of a completion in token ids, each with its parameters."""
        return json_response(encode(await self._rendered(request, read_completion, "cmpl-")))

    async def _rendered(
        self, request: Request, read: Callable[[bytes], Wanted], prefix: str
    ) -> list[RenderedRequest]:
        body = await read_body(request, self._config)
        with self._quotas.counting(key_of(request)) as booked:
            understood = await self._understanding.understand(lambda _: read(body), len(body))
            booked.tokens = sum(len(prompt.ids) for prompt in understood.prompts)
        return rendered(understood, f"{prefix}{understood.wanted.request_id or uuid.uuid4().hex}")

    async def native(self, request: Request) -> Response:
        """SGLang's ``/generate``."""
        body = await self._answering.receive_body(request)
        asked = await run_sized(lambda: read_native(body), len(body))
        with in_terms_of(native_generation.NAMES):
            understood = await self._understanding.understand(
                lambda served: native_generation.as_completion(asked, served.max_model_len), len(body)
            )
            shape = partial(NativeAnswer, asked, understood)
            return await self._answering.answer_request(request, understood, "", shape)

    async def responses(self, request: Request) -> Response:
        body = await self._answering.receive_body(request)
        asked = await run_sized(lambda: read_responses(body), len(body))
        terms = stored_terms(request)
        stored = terms is not None and not terms.is_whole
        is_resolved = stored or getattr(request.state, "is_resolved", False)
        with in_terms_of(responses_request.NAMES):
            translated = await run_sized(
                lambda: responses_request.translated(asked, is_resolved=is_resolved), len(body)
            )
            understood = await self._understanding.understand(lambda _: translated.chat, len(body))
            shape = partial(ResponsesAnswer, asked, understood, translated.names, stored=stored)
            answer = await self._answering.answer_request(request, understood, "resp_", shape)
        if translated.left_out:
            answer.headers[LEFT_OUT] = ", ".join(translated.left_out)
            logger.info("left out of the prompt, as no server runs them here: %s", answer.headers[LEFT_OUT])
        return answer

    async def messages(self, request: Request) -> Response:
        body = await self._answering.receive_body(request)
        with in_terms_of(messages_request.NAMES):
            understood = await self._understanding.understand(
                lambda _: messages_request.chat_request(read_messages(body)), len(body), budget_is_advice=True
            )
            shape = partial(MessageAnswer, understood)
            return await self._answering.answer_request(request, understood, "msg_", shape)

    async def input_tokens(self, request: Request) -> Response:
        """Number of prompt tokens of a request to /v1/responses."""
        body = await read_body(request, self._config)
        with in_terms_of(responses_request.NAMES):
            count = await self._count(
                request, lambda _: responses_request.translated(read_responses(body)).chat, len(body)
            )
        return json_response(encode(InputTokens(count)))

    async def count_tokens(self, request: Request) -> Response:
        """Number of prompt tokens of a request to /v1/messages."""
        body = await read_body(request, self._config)
        with in_terms_of(messages_request.NAMES):
            count = await self._count(
                request, lambda _: messages_request.chat_request(read_count_tokens(body)), len(body)
            )
        return json_response(encode(TokenCount(count)))

    async def _count(self, request: Request, read: Callable[[ServedModel], ChatRequest], size: int) -> int:
        with self._quotas.counting(key_of(request)) as booked:
            booked.tokens = await self._understanding.count(read, size)
        return booked.tokens
