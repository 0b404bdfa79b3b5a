"""Handlers of Ollama's endpoints that generate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from router.api.answering import Answering
from router.api.answers import json_response
from router.api.ollama.answer import OllamaAnswer, OllamaAsked, loaded_line
from router.api.ollama.request import NAMES, as_chat, as_generation, known_name
from router.api.ollama.wire import OllamaChatRequest, OllamaGenerateRequest
from router.api.understanding import Understanding, Wanted
from router.errors import in_terms_of, refuse
from router.http.body import decoder
from router.http.large_bodies import run_sized
from router.mesh import ServedModel
from router.text.text_models import TextModels

read_ollama_chat = decoder(OllamaChatRequest)
read_ollama_generate = decoder(OllamaGenerateRequest)


class OllamaGenerating:
    """Handlers of ``/api/chat`` and ``/api/generate``."""

    def __init__(self, understanding: Understanding, answering: Answering, models: TextModels) -> None:
        self._understanding = understanding
        self._answering = answering
        self._models = models

    def __repr__(self) -> str:
        return f"<OllamaGenerating with {self._understanding!r}>"

    async def chat(self, request: Request) -> Response:
        body = await self._answering.receive_body(request, any_type=True)
        asked = await run_sized(lambda: read_ollama_chat(body), len(body))
        return await self._answer(request, asked, lambda served: as_chat(asked, served), len(body))

    async def generate(self, request: Request) -> Response:
        body = await self._answering.receive_body(request, any_type=True)
        asked = await run_sized(lambda: read_ollama_generate(body), len(body))
        return await self._answer(request, asked, lambda served: as_generation(asked, served), len(body))

    async def _answer(
        self, request: Request, asked: OllamaAsked, read: Callable[[ServedModel], Wanted], size: int
    ) -> Response:
        if asked.is_empty:
            served = self._models.served()
            self._models.served(known_name(asked.model, served.knows))
            return json_response(loaded_line(asked, asked.model or served.names[0]))
        with in_terms_of(NAMES):
            understood = await self._understanding.understand(read, size)
            if asked.think and not understood.turn_format.knows_reasoning:
                name = asked.model or understood.model.name
                refuse(f'"{name}" does not support thinking: the router has no --reasoning-parser.', "think")
            shape = partial(OllamaAnswer, asked, understood, request.state.arrival)
            return await self._answering.answer_request(request, understood, "", shape)
