"""Handlers of the endpoints that give embeddings."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coordinator.pooled_model import PoolingTask
from engine.pooling_params import Pooled, PoolingParams
from router.api.answers import encode, json_response
from router.api.ollama.request import known_name
from router.api.stored_terms import stored_terms
from router.errors import refuse
from router.http.body import decoder
from router.http.large_bodies import run_sized
from router.pooled import wire
from router.pooled.inputs import TO_FIT, Cutting, PooledTokens, Text, inputs_of, prompt_named, texts_of
from router.pooled.run import (
    PooledRunner,
    activation_of,
    check_dimensions,
    floats,
    numbers,
    params_of,
)
from router.text.text_model import TextModel
from router.text.text_models import TextModels

_read_embedding = decoder(wire.EmbeddingRequest)
_read_pooling = decoder(wire.PoolingRequest)
_read_cohere = decoder(wire.CohereEmbedRequest)
_read_tei = decoder(wire.TeiRequest)
_read_ollama = decoder(wire.OllamaEmbedRequest)

PROMPTS_OF_COHERE = {
    "search_query": ("query",),
    "search_document": ("document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Names that a model may have for the prompt of an ``input_type``."""


class Embedded:
    """Embeddings of a request, in the order of its inputs."""

    def __init__(self, model: TextModel, inputs: Sequence[PooledTokens], found: Sequence[Pooled]) -> None:
        self.model = model
        self.found = found
        self.num_tokens = sum(len(each.ids) for each in inputs)

    @property
    def usage(self) -> wire.PooledUsage:
        return wire.PooledUsage(self.num_tokens, self.num_tokens)

    def floats(self) -> list[list[float]]:
        return [floats(each) for each in self.found]

    def base64(self) -> list[str]:
        return [base64.b64encode(each.values).decode() for each in self.found]


class EmbeddingEndpoints:
    """Handlers of ``/v1/embeddings`` and its like in other words."""

    def __init__(self, runner: PooledRunner, models: TextModels) -> None:
        self._runner = runner
        self._models = models

    def __repr__(self) -> str:
        return f"<EmbeddingEndpoints with {self._runner!r}>"

    async def embeddings(self, request: Request) -> Response:
        """OpenAI's ``/v1/embeddings``."""
        body = await self._runner.body(request)
        asked = await run_sized(lambda: _read_embedding(body), len(body))
        check_base64(asked)
        model = await self._runner.model(asked.model, PoolingTask.EMBED)
        texts = texts_of(asked.input, "input")
        embedded = await self.embed(
            request, model, texts, cutting_of(asked, texts), "input",
            prompt=prompt_named(asked.prompt_name, model), dimensions=asked.dimensions,
            normalize=activation_of(asked, asked.normalize, "normalize"),
        )  # fmt: skip

        def answer() -> bytes:
            is_text = asked.encoding_format == "base64"
            values: Sequence[Any] = embedded.base64() if is_text else embedded.floats()
            items = [
                wire.PooledItem(index=index, object="embedding", embedding=each)
                for index, each in enumerate(values)
            ]
            return encode(pooled_list(request, "embd-", asked.model or model.name, items, embedded.usage))

        return json_response(await run_sized(answer, _bytes(embedded.found)))

    async def pooling(self, request: Request) -> Response:
        """vLLM's ``/pooling``: the numbers of any task."""
        body = await self._runner.body(request)
        asked = await run_sized(lambda: _read_pooling(body), len(body))
        check_base64(asked)
        tasks = [PoolingTask(asked.task)] if asked.task else list(PoolingTask)
        model = await self._runner.model(asked.model, *tasks)
        assert model.served.pooling is not None
        task = PoolingTask(asked.task) if asked.task else model.served.pooling.tasks[0]
        params = params_of(asked, task, model.served.pooling)
        texts = texts_of(asked.input, "input")
        inputs = await tokenised(model, texts, cutting_of(asked, texts), "input")
        found = await self._runner.run(request, inputs, params, asked.model)
        embedded = Embedded(model, inputs, found)

        def answer() -> bytes:
            is_text = asked.encoding_format == "base64"
            values: Sequence[Any] = embedded.base64() if is_text else [numbers(each) for each in found]
            items = [
                wire.PooledItem(index=index, object="pooling", data=each) for index, each in enumerate(values)
            ]
            return encode(pooled_list(request, "pool-", asked.model or model.name, items, embedded.usage))

        return json_response(await run_sized(answer, _bytes(found)))

    async def cohere(self, request: Request) -> Response:
        """Cohere's ``/v2/embed``."""
        body = await self._runner.body(request)
        asked = await run_sized(lambda: _read_cohere(body), len(body))
        if asked.images or asked.inputs:
            refuse("images and inputs are not supported: send texts.", "images" if asked.images else "inputs")
        model = await self._runner.model(asked.model, PoolingTask.EMBED)
        assert model.served.pooling is not None
        names = PROMPTS_OF_COHERE.get(asked.input_type or "", ())
        prompts = (
            model.served.pooling.prompts[name] for name in names if name in model.served.pooling.prompts
        )
        if asked.truncate == "NONE":
            cutting = Cutting(max_tokens=asked.max_tokens)
        else:
            longest = model.served.max_model_len
            cutting = Cutting(min(asked.max_tokens or longest, longest), asked.truncate == "START")
        embedded = await self.embed(
            request, model, texts_of(asked.texts or [], "texts"), cutting, "texts",
            prompt=next(prompts, ""), dimensions=asked.output_dimension, named="output_dimension",
        )  # fmt: skip
        kinds = asked.embedding_types or ["float"]
        answer = wire.CohereEmbedded(
            id=request.state.request_id,
            embeddings=wire.CohereEmbeddings(),
            texts=asked.texts or [],
            meta=wire.CohereMeta(wire.Billed(embedded.num_tokens)),
        )
        if "float" in kinds:
            answer.embeddings.floats = embedded.floats()
        if "base64" in kinds:
            answer.embeddings.base64 = embedded.base64()
        return json_response(await run_sized(lambda: encode(answer), _bytes(embedded.found)))

    async def tei(self, request: Request) -> Response:
        """TEI's ``/embed``."""
        body = await self._runner.body(request)
        asked = await run_sized(lambda: _read_tei(body), len(body))
        model = await self._runner.model(None, PoolingTask.EMBED)
        embedded = await self.embed(
            request, model, texts_of(asked.inputs, "inputs"), tei_cutting(asked), "inputs",
            prompt=prompt_named(asked.prompt_name, model), dimensions=asked.dimensions,
            normalize=asked.normalize,
        )  # fmt: skip
        return json_response(await run_sized(lambda: encode(embedded.floats()), _bytes(embedded.found)))

    async def ollama(self, request: Request) -> Response:
        """Ollama's ``/api/embed``."""
        asked, embedded = await self._ollama(request, "input")
        taken = round((time.perf_counter() - request.state.arrival) * 1e9)
        name = asked.model or embedded.model.name
        answer = wire.OllamaEmbedded(name, embedded.floats(), taken, 0, embedded.num_tokens)
        return json_response(await run_sized(lambda: encode(answer), _bytes(embedded.found)))

    async def older_ollama(self, request: Request) -> Response:
        """Ollama's older ``/api/embeddings``: one text."""
        _, embedded = await self._ollama(request, "prompt")
        return json_response(encode(wire.OllamaEmbedding(embedded.floats()[0])))

    async def _ollama(self, request: Request, field: str) -> tuple[wire.OllamaEmbedRequest, Embedded]:
        body = await self._runner.body(request, any_type=True)
        asked = await run_sized(lambda: _read_ollama(body), len(body))
        name = known_name(asked.model, self._models.served().knows)
        model = await self._runner.model(name, PoolingTask.EMBED)
        given = asked.prompt if field == "prompt" else asked.input
        cutting = Cutting(None if asked.truncate is False else TO_FIT)
        prompt = prompt_named(None, model)
        return asked, await self.embed(
            request, model, texts_of(given or [], field), cutting, field,
            prompt=prompt, dimensions=asked.dimensions,
        )  # fmt: skip

    async def embed(
        self,
        request: Request,
        model: TextModel,
        texts: Sequence[Text],
        cutting: Cutting,
        param: str,
        *,
        prompt: str = "",
        dimensions: int | None = None,
        named: str = "dimensions",
        normalize: bool | None = None,
    ) -> Embedded:
        """Embeddings of texts; ``param`` and ``named`` are the client's names of two fields."""
        assert model.served.pooling is not None
        cut = check_dimensions(dimensions, model.served.pooling, named)
        params = PoolingParams(PoolingTask.EMBED, dimensions=cut, normalize=normalize)
        inputs = await tokenised(model, texts, cutting, param, prompt)
        return Embedded(model, inputs, await self._runner.run(request, inputs, params, model.name))


async def tokenised(
    model: TextModel, texts: Sequence[Text], cutting: Cutting, param: str, prompt: str = ""
) -> list[PooledTokens]:
    """Token ids of texts, made in a thread where they are long."""
    size = sum(map(len, texts))
    return await run_sized(lambda: inputs_of(texts, model, cutting, param, prompt=prompt), size)


def check_base64(asked: wire.InputsRequest) -> None:
    """Refuse base64 of numbers in another form than the one that is answered.

    Raises:
        ApiError: of another type, or in another order of bytes (400).
    """
    if asked.encoding_format != "base64":
        return
    if asked.embed_dtype not in (None, "float32"):
        refuse("embed_dtype must be float32, as no other is supported.", "embed_dtype")
    if asked.endianness == "big":
        refuse("endianness must be little, as big is not supported.", "endianness")


def cutting_of(asked: wire.PooledRequest, texts: Sequence[Text] = ()) -> Cutting:
    """What vLLM's fields ask for.

    Raises:
        ApiError: texts shall have no special tokens (400).
    """
    is_bare = isinstance(asked, wire.InputsRequest) and asked.add_special_tokens is False
    if is_bare and any(isinstance(each, str) for each in texts):
        refuse("add_special_tokens false is not supported: send token ids.", "add_special_tokens")
    return Cutting(asked.truncate_prompt_tokens, asked.truncation_side == "left")


def tei_cutting(asked: wire.TeiRequest | wire.RerankRequest | wire.SimilarityParameters) -> Cutting:
    """``truncate`` of TEI cuts at the end, unless ``truncation_direction`` names the left side."""
    is_left = (asked.truncation_direction or "").lower() == "left"
    return Cutting(TO_FIT if asked.truncate else None, is_left)


def pooled_list(
    request: Request, prefix: str, model: str, items: list[wire.PooledItem], usage: wire.PooledUsage
) -> wire.PooledList:
    """An answer in the words of OpenAI and vLLM; ``prefix`` begins its id."""
    stored = stored_terms(request)
    created = int(time.time()) if stored is None else stored.created
    return wire.PooledList(
        id=prefix + request.state.request_id, created=created, model=model, data=items, usage=usage
    )


def _bytes(found: Sequence[Pooled]) -> int:
    """Size of answers, which decides where they are encoded."""
    return sum(len(each.values) for each in found)
