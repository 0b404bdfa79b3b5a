"""The endpoints that need the mesh's model: the way of a request from its body to its answer."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from engine.checkpoint import CheckpointError
from engine.sampling import SamplingParams
from router.answers import Answer, encode
from router.body import decoder, read_body
from router.calls import UNPREDICTABLE, make_samples
from router.chat import ChatAnswer
from router.completions import CompletionAnswer
from router.config import HttpConfig
from router.errors import ApiError, refuse
from router.mesh import Mesh, ServedModel
from router.metrics import Metrics
from router.openai_api import (
    ChatRequest,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    GenerationRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from router.parameters import sampling_params
from router.prompts import PromptText, chat_prompt, check_vocabulary, completion_prompts, text_to_tokenize
from router.rules import MAX_ID_LENGTH, check_chat, check_completion, usable_id
from router.sample import Sample
from router.streaming import Call, EventStream, whole_answer
from router.text_model import TextModel, load_text_model
from router.tokens import TokenizerError

logger = logging.getLogger(__name__)

HEAVY = 50_000
"""Bodies of more bytes are tokenised in a thread, so that other clients' streams do not wait for it."""

Result = TypeVar("Result")

_read_completion = decoder(CompletionRequest)
_read_chat = decoder(ChatRequest)
_read_tokenize = decoder(TokenizeRequest)
_read_detokenize = decoder(DetokenizeRequest)


class Endpoints:
    """Handlers, and the text model that they share."""

    def __init__(self, mesh: Mesh, config: HttpConfig, metrics: Metrics) -> None:
        self._mesh = mesh
        self._config = config
        self._metrics = metrics
        self._text_model: TextModel | None = None
        self._loading = asyncio.Lock()
        self._started = int(time.time())
        self._chance = UNPREDICTABLE if config.seed is None else random.Random(config.seed)

    def __repr__(self) -> str:
        return f"<Endpoints of {self._text_model!r}>"

    # ---- generation

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        wanted = _read_completion(body)
        check_completion(wanted)
        model = await self._model(wanted.model)
        params = sampling_params(wanted, model, self._config.max_logprobs)
        prompts = await _run(lambda: completion_prompts(wanted, model), len(body))
        return await self._generate(request, wanted, params, prompts, model)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        wanted = _read_chat(body)
        check_chat(wanted)
        model = await self._model(wanted.model)
        params = sampling_params(wanted, model, self._config.max_logprobs)
        prompt = await _run(lambda: chat_prompt(wanted, model), len(body))
        return await self._generate(request, wanted, params, [prompt], model)

    async def _generate(
        self,
        request: Request,
        wanted: CompletionRequest | ChatRequest,
        params: SamplingParams,
        prompts: list[PromptText],
        model: TextModel,
    ) -> Response:
        client_id = _request_id(request, wanted)
        id = f"{'chatcmpl' if isinstance(wanted, ChatRequest) else 'cmpl'}-{client_id}"
        samples = make_samples(id, wanted, params, prompts, model, _rank(request), self._chance)
        answer = self._shape(id, wanted, model, samples)
        call = Call(self._mesh, self._metrics, samples, answer, arrival=request.state.arrival)
        headers = {"x-request-id": client_id} if self._config.enable_request_id_headers else {}
        if wanted.stream:
            return EventStream(call, headers)
        return _json(await whole_answer(call, request.receive), headers)

    def _shape(
        self,
        id: str,
        wanted: CompletionRequest | ChatRequest,
        model: TextModel,
        samples: list[Sample],
    ) -> Answer:
        common = {
            "id": id,
            "created": int(time.time()),
            "model": wanted.model or model.name,
            "samples": samples,
            "tells_cached_tokens": self._config.enable_prompt_tokens_details,
        }
        if isinstance(wanted, ChatRequest):
            return ChatAnswer(wanted, model.tokenizer, **common)
        return CompletionAnswer(wanted, model.tokenizer, **common)

    # ---- tokens

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        wanted = _read_tokenize(body)
        model = await self._model(wanted.model)

        def encode_text() -> list[int]:
            text, add_special_tokens = text_to_tokenize(wanted, model)
            return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)

        ids = await _run(encode_text, len(body))
        answer = TokenizeAnswer(len(ids), model.served.max_model_len, ids)
        if wanted.return_token_strs:
            answer.token_strs = [model.tokenizer.token_text(token_id) for token_id in ids]
        return _json(encode(answer))

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request)
        wanted = _read_detokenize(body)
        model = await self._model(wanted.model)
        check_vocabulary(wanted.tokens, model, "tokens")
        text = await _run(lambda: model.tokenizer.decode(wanted.tokens), len(body))
        return _json(encode(DetokenizeAnswer(text)))

    # ---- models

    async def models(self, request: Request) -> Response:
        return _json(encode(ModelList(self._cards(self._served()))))

    async def model(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        found = [card for card in self._cards(self._served()) if card.id == name]
        if not found:
            raise _no_such_model(name)
        return _json(encode(found[0]))

    def _cards(self, served: ServedModel) -> list[ModelCard]:
        return [
            ModelCard(name, self._started, served.max_model_len, root=served.names[0])
            for name in served.names
        ]

    # ---- helpers

    async def _body(self, request: Request) -> bytes:
        body = await read_body(request, self._config.max_request_bytes, self._config.request_timeout)
        request.state.arrival = time.perf_counter()
        return body

    def _served(self, name: str | None = None) -> ServedModel:
        """The mesh's model, if it goes by this name."""
        served = self._mesh.model
        if served is None:
            raise ApiError(503, "No instance has joined the mesh yet.", headers={"retry-after": "1"})
        if name and name not in served.names:
            raise _no_such_model(name)
        return served

    async def _model(self, name: str | None) -> TextModel:
        """The text side of the model, loaded when it is first needed."""
        served = self._served(name)
        if self._text_model is None or self._text_model.served != served:
            async with self._loading:
                if self._text_model is None or self._text_model.served != served:
                    self._text_model = await self._load(served)
        return self._text_model

    async def _load(self, served: ServedModel) -> TextModel:
        try:
            return await asyncio.to_thread(load_text_model, served, self._config)
        except (TokenizerError, CheckpointError) as error:
            logger.error("the tokenizer of %s cannot be used: %s", served.names[0], error)
            raise ApiError(
                500,
                "The model's tokenizer cannot be used; the router's log says why.",
                headers={"x-should-retry": "false"},
            ) from error


async def _run(work: Callable[[], Result], size: int) -> Result:
    return work() if size <= HEAVY else await asyncio.to_thread(work)


def _no_such_model(name: str) -> ApiError:
    return ApiError(404, f"The model `{name[:100]}` does not exist.", param="model")


def _json(body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, headers=headers, media_type="application/json")


def _request_id(request: Request, wanted: GenerationRequest) -> str:
    """The client's own, from the header or the body, else a new one."""
    given = request.headers.get("x-request-id")
    if given is None:
        return wanted.request_id or uuid.uuid4().hex
    if not usable_id(given):
        refuse(f"X-Request-Id must be printable ASCII of at most {MAX_ID_LENGTH} characters.", "X-Request-Id")
    return given


def _rank(request: Request) -> int | None:
    """The instance that the client wants."""
    given = request.headers.get("x-data-parallel-rank")
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        refuse(f"X-data-parallel-rank must be a whole number, got {given[:20]!r}.", "X-data-parallel-rank")
    return int(given)
