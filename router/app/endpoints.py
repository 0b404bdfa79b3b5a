"""Endpoints that generate nothing: tokenization, models, and load."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from router.api.answers import encode, json_response
from router.api.headers import key_of
from router.api.prompts import check_vocabulary, text_to_tokenize
from router.config import HttpConfig
from router.errors import ApiError, refuse
from router.http.body import decoder, read_body
from router.http.large_bodies import run_sized
from router.http.quotas import Quotas
from router.mesh import ServedModel
from router.metrics.loads import Loads, ServerLoad, loads_of, older_loads_of
from router.metrics.metrics import Metrics
from router.openai_api import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from router.text.text_models import TextModels, no_such_model

_read_tokenize = decoder(TokenizeRequest)
_read_detokenize = decoder(DetokenizeRequest)


class Endpoints:
    """Handlers of the endpoints that generate nothing."""

    def __init__(self, config: HttpConfig, metrics: Metrics, models: TextModels, quotas: Quotas) -> None:
        self._config = config
        self._metrics = metrics
        self._models = models
        self._quotas = quotas
        self._started = int(time.time())

    def __repr__(self) -> str:
        return f"<Endpoints of {self._models!r}>"

    # ---- tokens

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, self._config)
        wanted = await run_sized(lambda: _read_tokenize(body), len(body))
        model = await self._models.get(wanted.model)

        def answer() -> tuple[int, bytes]:
            text, add_special_tokens = text_to_tokenize(wanted, model)
            ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            told = TokenizeAnswer(len(ids), model.served.max_model_len, ids)
            if wanted.return_token_strs:
                told.token_strs = [model.tokenizer.piece(token_id) for token_id in ids]
            return len(ids), encode(told)

        with self._quotas.counting(key_of(request)) as booked:
            booked.tokens, told = await run_sized(answer, len(body))
        return json_response(told)

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, self._config)
        wanted = await run_sized(lambda: _read_detokenize(body), len(body))
        model = await self._models.get(wanted.model)

        def answer() -> bytes:
            check_vocabulary(wanted.tokens, model.served, "tokens")
            return encode(DetokenizeAnswer(model.tokenizer.decode(wanted.tokens)))

        with self._quotas.counting(key_of(request)) as booked:
            booked.tokens = len(wanted.tokens)
            return json_response(await run_sized(answer, len(body)))

    async def tokenizer_info(self, request: Request) -> Response:
        """Contents of tokenizer_config.json, special tokens as plain strings; needs a flag."""
        if not self._config.enable_tokenizer_info_endpoint:
            raise ApiError(404, "Start the router with --enable-tokenizer-info-endpoint to have this.")
        tokenizer = (await self._models.get(None)).tokenizer
        return json_response(encode(tokenizer.config | tokenizer.special_tokens))

    # ---- models

    async def models(self, request: Request) -> Response:
        return json_response(encode(ModelList(self._cards(self._models.served()))))

    async def model(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        found = [card for card in self._cards(self._models.served()) if card.id == name]
        if not found:
            raise no_such_model(name)
        return json_response(encode(found[0]))

    def _cards(self, served: ServedModel) -> list[ModelCard]:
        first, room = served.names[0], served.max_model_len
        taken = ("text", "image") if self._models.take_images(served) else ("text",)
        cards = [
            ModelCard(name, self._started, room, root=first, input_modalities=taken) for name in served.names
        ]
        of_adapters = [
            ModelCard(each.name, self._started, room, root=each.path, parent=first, input_modalities=taken)
            for each in served.adapters
        ]
        return cards + of_adapters

    # ---- load

    async def load(self, request: Request) -> Response:
        """``GET /load``: requests in flight in this router, in vLLM's format."""
        return json_response(encode(ServerLoad(self._metrics.in_flight)))

    async def loads(self, request: Request) -> Response:
        """``GET /v1/loads``: the load of each instance, in SGLang's format."""
        found = loads_of(self._metrics.reports())
        wanted = request.query_params.get("dp_rank")
        if wanted is not None:
            found = [load for load in found if str(load.dp_rank) == wanted]
            if not found:
                refuse(f"No instance with rank {wanted[:20]!r} has reported yet.", "dp_rank")
        return json_response(encode(Loads.of(found, time.time())))

    async def get_load(self, request: Request) -> Response:
        """``GET /get_load``: the load of each instance, for older tools of SGLang."""
        return json_response(encode(older_loads_of(self._metrics.reports(), self._metrics.block_size() or 0)))
