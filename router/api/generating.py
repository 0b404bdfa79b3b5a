"""Endpoints that generate: the way of a request from its body to its answer.

/v1/responses and /v1/messages are translated to a chat request, and answered in their own form.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from coordinator.process.process import REQUEST
from coordinator.process.tracing import Attributes, Tracing
from engine.sampling import SamplingParams
from router.api import token_generation
from router.api.answers import Answer, encode, json_response
from router.api.anthropic_messages import request as messages_request
from router.api.anthropic_messages.answer import MessageAnswer
from router.api.anthropic_messages.wire import CountTokensRequest, MessagesRequest, TokenCount
from router.api.capsules import capsule_of
from router.api.chat import ChatAnswer
from router.api.completions import CompletionAnswer
from router.api.headers import (
    MOST_REMARKS,
    deadline,
    key_of,
    numerics_changed,
    pinned_rank,
    preferred_rank,
    printable,
    request_id,
    session,
    wants_capsule,
)
from router.api.parameters import sampling_params
from router.api.prompts import PromptText, chat_prompt, completion_prompts, num_prompt_tokens
from router.api.request_samples import UNPREDICTABLE, make_samples
from router.api.responses import request as responses_request
from router.api.responses.answer import ResponsesAnswer
from router.api.responses.wire import InputTokens, ResponsesRequest
from router.api.streaming import Call, EventStream, whole_answer
from router.api.token_generation import GenerateRequest, TokensAnswer
from router.api.tracing import RequestTrace
from router.api.validation import check_chat, check_completion, keep_allowed_tools, keep_tools_out
from router.config import HttpConfig
from router.errors import in_terms_of, refuse
from router.http.body import decoder, read_body
from router.http.heavy import run_sized
from router.http.quotas import Quotas
from router.mesh import Mesh
from router.metrics.metrics import Metrics
from router.openai_api import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from router.text.output_stream import OutputStream
from router.text.text_model import TextModel
from router.text.text_models import TextModels
from router.turns import harmony
from router.turns.grammar_check import GrammarCheck
from router.turns.structured import ANSWER, form_of, text_of
from router.turns.turn_format import TurnFormat

logger = logging.getLogger(__name__)

NULL = msgspec.Raw(b"null")


class Invocation(msgspec.Struct):
    """Fields that distinguish a chat from a completion."""

    messages: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL


_read_invocation = decoder(Invocation)
_read_completion = decoder(CompletionRequest)
_read_chat = decoder(ChatRequest)
_read_generate = decoder(GenerateRequest)
_read_responses = decoder(ResponsesRequest)
_read_messages = decoder(MessagesRequest)
_read_count_tokens = decoder(CountTokensRequest)


@dataclass(frozen=True)
class Chat:
    """A chat request with its parameters and its prompt."""

    wanted: ChatRequest
    turn_format: TurnFormat
    model: TextModel
    params: SamplingParams
    prompt: PromptText
    not_enforced: Sequence[str] = ()
    """Paths of the given schemas that the answer need not follow."""


NOT_ENFORCED = "x-lockstep-not-enforced"
"""Response header: JSON paths of the schemas given that answers need not follow."""
LEFT_OUT = "x-lockstep-left-out"
"""Response header: types of tools and items that the model did not get."""

Shape = Callable[[dict[str, Any]], Answer]
"""Makes the answer, given what all answers have in common."""


class Generating:
    """Handlers of the endpoints that generate."""

    def __init__(
        self,
        mesh: Mesh,
        config: HttpConfig,
        metrics: Metrics,
        models: TextModels,
        quotas: Quotas,
        tracing: Tracing | None = None,
    ) -> None:
        self._mesh = mesh
        self._config = config
        self._metrics = metrics
        self._models = models
        self._quotas = quotas
        self._tracing = tracing
        self._grammars = GrammarCheck()
        self._chance = UNPREDICTABLE if config.seed is None else random.Random(config.seed)

    def __repr__(self) -> str:
        return f"<Generating with {self._models!r}>"

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, self._config)
        self._check_room(request)
        return await self._complete(request, body)

    async def chat(self, request: Request) -> Response:
        body = await read_body(request, self._config)
        self._check_room(request)
        return await self._chat(request, body)

    async def invocations(self, request: Request) -> Response:
        """A chat or a completion, by the fields given: the one path that SageMaker knows."""
        body = await read_body(request, self._config)
        self._check_room(request)
        given = await run_sized(lambda: _read_invocation(body), len(body))
        if (given.messages == NULL) == (given.prompt == NULL):
            refuse("/invocations needs messages, for a chat, or prompt, for a completion.", "messages")
        return await (self._complete if given.messages == NULL else self._chat)(request, body)

    async def tokens(self, request: Request) -> Response:
        """``/inference/v1/generate``: token ids in and out."""
        body = await read_body(request, self._config)
        self._check_room(request)
        asked = await run_sized(lambda: _read_generate(body), len(body))

        def shape(common: dict[str, Any]) -> Answer:
            return TokensAnswer(asked, wanted, **common)

        model = await self._models.get(asked.model)
        with in_terms_of(token_generation.NAMES):
            wanted = token_generation.as_completion(asked, model.served.max_model_len)
            return await self._completion(request, wanted, "generate-tokens-", shape, len(body))

    async def _complete(self, request: Request, body: bytes) -> Response:
        wanted = await run_sized(lambda: _read_completion(body), len(body))
        return await self._completion(request, wanted, "cmpl-", None, len(body))

    async def _completion(
        self, request: Request, wanted: CompletionRequest, prefix: str, shape: Shape | None, size: int
    ) -> Response:
        """The answer to a completion; ``shape`` is that of /v1/completions if None."""
        check_completion(wanted)
        model = await self._models.get(wanted.model)
        form = await run_sized(lambda: form_of(wanted, self._config.structured_outputs), size)
        params = sampling_params(wanted, model, self._config.max_logprobs)
        not_enforced: Sequence[str] = ()
        if form is not None:
            grammar = text_of({ANSWER: form.body})
            params, not_enforced = await self._with_grammar(params, grammar, form.param, {ANSWER: form.param})
        prompts = await run_sized(lambda: completion_prompts(wanted, model), size)

        def completion(common: dict[str, Any]) -> Answer:
            return CompletionAnswer(wanted, model.tokenizer, **common)

        shape = shape or completion
        return await self._generate(request, prefix, wanted, params, prompts, model, shape, not_enforced)

    async def _chat(self, request: Request, body: bytes) -> Response:
        chat = await self._understand(lambda: _read_chat(body), len(body))

        def shape(common: dict[str, Any]) -> Answer:
            role = self._config.response_role
            return ChatAnswer(chat.wanted, chat.model.tokenizer, chat.turn_format, role, **common)

        return await self._answer(request, "chatcmpl-", chat, shape)

    async def responses(self, request: Request) -> Response:
        body = await read_body(request, self._config)
        self._check_room(request)
        asked = await run_sized(lambda: _read_responses(body), len(body))

        def shape(common: dict[str, Any]) -> Answer:
            tokenizer, names = chat.model.tokenizer, translated.names
            return ResponsesAnswer(asked, chat.params, chat.turn_format, tokenizer, names, **common)

        with in_terms_of(responses_request.NAMES):
            translated = await run_sized(lambda: responses_request.translated(asked), len(body))
            chat = await self._understand(lambda: translated.chat, len(body))
            answer = await self._answer(request, "resp_", chat, shape)
        if translated.left_out:
            answer.headers[LEFT_OUT] = ", ".join(translated.left_out)
            logger.info("left out of the prompt, as no server runs them here: %s", answer.headers[LEFT_OUT])
        return answer

    async def input_tokens(self, request: Request) -> Response:
        """Number of prompt tokens of a request to /v1/responses."""
        body = await read_body(request, self._config)
        with in_terms_of(responses_request.NAMES):
            count = await self._count(
                request, lambda: responses_request.translated(_read_responses(body)).chat, len(body)
            )
        return json_response(encode(InputTokens(count)))

    async def messages(self, request: Request) -> Response:
        body = await read_body(request, self._config)
        self._check_room(request)

        def read() -> ChatRequest:
            return messages_request.chat_request(_read_messages(body))

        def shape(common: dict[str, Any]) -> Answer:
            return MessageAnswer(chat.turn_format, **common)

        with in_terms_of(messages_request.NAMES):
            chat = await self._understand(read, len(body), budget_is_advice=True)
            return await self._answer(request, "msg_", chat, shape)

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request, self._config)
        with in_terms_of(messages_request.NAMES):
            count = await self._count(
                request, lambda: messages_request.chat_request(_read_count_tokens(body)), len(body)
            )
        return json_response(encode(TokenCount(count)))

    # ---- helpers

    def _check_room(self, request: Request) -> None:
        """Refuse a request early if it could not be admitted now, as far as known."""
        self._mesh.check_room()
        self._quotas.check(key_of(request))

    async def _understand(
        self, read: Callable[[], ChatRequest], size: int, *, budget_is_advice: bool = False
    ) -> Chat:
        """``budget_is_advice``: a reasoning budget that cannot be kept does not refuse the request."""
        wanted = await run_sized(lambda: check_chat(read()), size)
        model = await self._models.get(wanted.model)
        chat, grammar = await run_sized(lambda: self._prepared(wanted, model, budget_is_advice), size)
        if grammar is None:
            return chat
        param, places = chat.turn_format.grammar_param, chat.turn_format.grammar_places
        params, not_enforced = await self._with_grammar(chat.params, grammar, param, places)
        return replace(chat, params=params, not_enforced=not_enforced)

    def _prepared(
        self, wanted: ChatRequest, model: TextModel, budget_is_advice: bool
    ) -> tuple[Chat, str | None]:
        """A checked request with its prompt, and the grammar that its answers follow."""
        config = self._config
        speaks = harmony.is_written(model.tokenizer, config.reasoning_parser, config.tool_call_parser)
        sent = wanted.tools or ()
        keep_allowed_tools(wanted)
        turn_format = TurnFormat(wanted, config, harmony=speaks, sent=sent)
        if turn_format.needs_special_tokens(model.tokenizer):
            wanted.skip_special_tokens = False
        keep_tools_out(wanted, config)
        params = sampling_params(wanted, model, config.max_logprobs)
        prompt = chat_prompt(wanted, model)
        if turn_format.reads_reasoning or not budget_is_advice:
            thinking = turn_format.thinking(prompt.text, model.tokenizer)
            params = msgspec.structs.replace(params, thinking=thinking)
        grammar = turn_format.grammar(prompt.text, model.tokenizer)
        return Chat(wanted, turn_format, model, params, prompt), grammar

    async def _count(self, request: Request, read: Callable[[], ChatRequest], size: int) -> int:
        """Tokens of the prompt.

        Whether there is room for it, or parsers for its tools, does not matter.
        """
        wanted = await run_sized(lambda: check_chat(read()), size)
        model = await self._models.get(wanted.model)
        keep_allowed_tools(wanted)
        keep_tools_out(wanted, self._config)
        with self._quotas.counting(key_of(request)) as booked:
            booked.tokens = await run_sized(lambda: num_prompt_tokens(wanted, model), size)
        return booked.tokens

    async def _with_grammar(
        self, params: SamplingParams, text: str, param: str, places: Mapping[str, str]
    ) -> tuple[SamplingParams, Sequence[str]]:
        """Parameters with a grammar, and the paths of it that are not enforced."""
        checked = await self._grammars.check(text, param, places)
        return msgspec.structs.replace(params, grammar=checked.text), checked.remarks(places)

    async def _answer(self, request: Request, prefix: str, chat: Chat, shape: Shape) -> Response:
        return await self._generate(
            request, prefix, chat.wanted, chat.params, [chat.prompt], chat.model, shape, chat.not_enforced
        )

    async def _generate(
        self,
        request: Request,
        prefix: str,
        wanted: GenerationRequest,
        params: SamplingParams,
        prompts: list[PromptText],
        model: TextModel,
        shape: Shape,
        not_enforced: Sequence[str] = (),
    ) -> Response:
        client_id = request.state.request_id = request_id(request, wanted)
        REQUEST.set(client_id)
        if self._config.enable_force_include_usage and wanted.stream:
            wanted.stream_options = wanted.stream_options or StreamOptions()
            wanted.stream_options.include_usage = wanted.stream_options.continuous_usage_stats = True
        id = prefix + client_id
        arrival = request.state.arrival
        given = request.headers.get("traceparent")
        facts = _facts(id, model, params)
        trace = RequestTrace.begin(self._tracing, request.url.path, given, arrival, facts)
        try:
            call = self._call(request, id, wanted, params, prompts, model, shape, trace)
        except Exception as error:
            trace.end_with(error)
            raise
        response: Response
        if wanted.stream:
            response = EventStream(call, keep_alive=self._config.sse_keep_alive_interval)
        else:
            response = json_response(await whole_answer(call, request.receive))
            changes = (change for sample in call.samples for change in sample.numerics_changes)
            response.headers.update(numerics_changed(changes))
        if not_enforced:
            response.headers[NOT_ENFORCED] = printable("; ".join(not_enforced), MOST_REMARKS)
        return response

    def _call(
        self,
        request: Request,
        id: str,
        wanted: GenerationRequest,
        params: SamplingParams,
        prompts: list[PromptText],
        model: TextModel,
        shape: Shape,
        trace: RequestTrace,
    ) -> Call:
        """The call of a request that is admitted."""
        records = wants_capsule(request)
        samples = make_samples(
            id, wanted, params, prompts, model, pinned_rank(request, wanted), self._chance,
            session(request, wanted), trace.traceparent, records=records, preferred=preferred_rank(request),
        )  # fmt: skip
        timeout, created = deadline(request, wanted), int(time.time())
        answer = shape(
            {
                "id": id,
                "created": created,
                "model": wanted.model or model.name,
                "samples": samples,
                "tells_cached_tokens": self._config.enable_prompt_tokens_details,
            }
        )
        return Call(
            self._mesh,
            self._metrics,
            samples,
            answer,
            arrival=request.state.arrival,
            timeout=timeout,
            lease=self._quotas.admit(key_of(request), sum(len(prompt.ids) for prompt in prompts)),
            trace=trace,
            capsule=(lambda: self._capsule(id, created, model, params, samples)) if records else None,
        )

    def _capsule(
        self,
        id: str,
        created: int,
        model: TextModel,
        params: SamplingParams,
        samples: Sequence[OutputStream],
    ) -> bytes:
        return capsule_of(id, created, model, self._mesh.numerics(), params, samples)


def _facts(id: str, model: TextModel, params: SamplingParams) -> Attributes:
    """Attributes of a request's span, under the names that vLLM gives them."""
    return {
        "gen_ai.request.id": id,
        "gen_ai.response.model": model.name,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens or 0,
    }
