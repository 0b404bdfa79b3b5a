"""Handlers of the endpoints that give scores and classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coordinator.pooled_model import PoolingTask
from engine.pooling_params import PoolingParams
from router.api.answers import encode, json_response
from router.errors import refuse
from router.http.body import decoder
from router.http.large_bodies import run_sized
from router.pooled import wire
from router.pooled.embedding import EmbeddingEndpoints, cutting_of, pooled_list, tei_cutting, tokenised
from router.pooled.inputs import MOST_INPUTS, Cutting, pairs_of, prompt_named, texts_of
from router.pooled.run import ACTIVATIONS, PooledRunner, activation_of, floats, params_of
from router.text.text_model import TextModel

_read_score = decoder(wire.ScoreRequest)
_read_rerank = decoder(wire.RerankRequest)
_read_classify = decoder(wire.PoolingRequest)
_read_tei = decoder(wire.TeiRequest)
_read_similarity = decoder(wire.SimilarityRequest)

FIRSTS = ("text_1", "queries", "data_1")
"""vLLM's names of the first texts of pairs."""
SECONDS = ("text_2", "documents", "items", "data_2")
"""vLLM's names of the second texts of pairs."""


class ScoringEndpoints:
    """Handlers of scores of pairs and of classes, for four APIs."""

    def __init__(self, runner: PooledRunner, embedding: EmbeddingEndpoints) -> None:
        self._runner = runner
        self._embedding = embedding

    def __repr__(self) -> str:
        return f"<ScoringEndpoints with {self._runner!r}>"

    async def score(self, request: Request) -> Response:
        """vLLM's ``/score``."""
        body = await self._runner.body(request)
        asked = await run_sized(lambda: _read_score(body), len(body))
        first, second = _given(asked, FIRSTS), _given(asked, SECONDS)
        firsts, seconds = _texts(getattr(asked, first), first), _texts(getattr(asked, second), second)
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            refuse(f"{first} has {len(firsts)} texts, {second} {len(seconds)}: give one, or as many.", first)
        model = await self._runner.model(asked.model, PoolingTask.SCORE, PoolingTask.EMBED)
        pairs = list(zip(firsts, seconds, strict=True))
        scores, usage = await self._scores(
            request, model, asked, pairs, cutting_of(asked), second, activation=activation_of(asked)
        )
        items = [wire.PooledItem(index=i, object="score", score=each) for i, each in enumerate(scores)]
        return json_response(encode(pooled_list(request, "score-", asked.model or model.name, items, usage)))

    async def rerank(self, request: Request) -> Response:
        """``/rerank`` of Cohere and Jina, and TEI's where the body has ``texts``."""
        body = await self._runner.body(request)
        asked = await run_sized(lambda: _read_rerank(body), len(body))
        if (asked.documents is None) == (asked.texts is None):
            refuse("give either documents or texts.", "documents")
        is_tei = asked.documents is None
        param = "texts" if is_tei else "documents"
        given = asked.documents or asked.texts or []
        documents = _texts([each if isinstance(each, str) else each.text for each in given], param)
        if not asked.query:
            refuse("query is empty.", "query")
        model = await self._runner.model(asked.model, PoolingTask.SCORE, PoolingTask.EMBED)
        vllms, teis = cutting_of(asked), tei_cutting(asked)
        limit = teis.limit if vllms.limit is None else vllms.limit
        cutting = Cutting(limit, vllms.from_end or teis.from_end)
        activation = activation_of(asked, False if asked.raw_scores else None, "raw_scores")
        pairs = [(asked.query, each) for each in documents]
        scores, usage = await self._scores(
            request, model, asked, pairs, cutting, param, activation=activation
        )
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: asked.top_n or None]
        if is_tei:
            ranks = [wire.TeiRank(index, scores[index]) for index in order]
            for rank in ranks if asked.return_text else ():
                rank.text = documents[rank.index]
            return json_response(encode(ranks))
        results = [wire.Ranked(index, scores[index]) for index in order]
        is_cohere = request.url.path.endswith("/v2/rerank")
        shows = not is_cohere if asked.return_documents is None else asked.return_documents
        for result in results if shows else ():
            result.document = wire.Document(documents[result.index])
        answer = wire.RankedList(
            id="rerank-" + request.state.request_id,
            model=asked.model or model.name,
            results=results,
            usage=usage,
            meta=wire.CohereMeta(wire.Billed(usage.total_tokens)),
        )
        return json_response(encode(answer))

    async def similarity(self, request: Request) -> Response:
        """TEI's ``/similarity``: cosines of embeddings."""
        body = await self._runner.body(request)
        asked = await run_sized(lambda: _read_similarity(body), len(body))
        model = await self._runner.model(None, PoolingTask.EMBED)
        parameters = asked.parameters or wire.SimilarityParameters()
        sentences = _texts(asked.inputs.sentences, "inputs.sentences")
        cosines, _ = await self._cosines(
            [(asked.inputs.source_sentence, each) for each in sentences],
            request, model, tei_cutting(parameters), "inputs.sentences",
            prompt=prompt_named(parameters.prompt_name, model, "parameters.prompt_name"),
        )  # fmt: skip
        return json_response(encode(cosines))

    async def classify(self, request: Request) -> Response:
        """vLLM's ``/classify``."""
        body = await self._runner.body(request)
        asked = await run_sized(lambda: _read_classify(body), len(body))
        model = await self._runner.model(asked.model, PoolingTask.CLASSIFY)
        if asked.task not in (None, PoolingTask.CLASSIFY):
            refuse("Classes have the task classify.", "task")
        assert model.served.pooling is not None
        params = params_of(asked, PoolingTask.CLASSIFY, model.served.pooling)
        texts = texts_of(asked.input, "input")
        inputs = await tokenised(model, texts, cutting_of(asked, texts), "input")
        found = [floats(each) for each in await self._runner.run(request, inputs, params, asked.model)]
        items = [
            wire.PooledItem(
                index=index,
                object="classify",
                label=_label(probs.index(max(probs)), model),
                probs=probs,
                num_classes=len(probs),
            )
            for index, probs in enumerate(found)
        ]
        num_tokens = sum(len(each.ids) for each in inputs)
        usage = wire.PooledUsage(num_tokens, num_tokens)
        name = asked.model or model.name
        return json_response(encode(pooled_list(request, "classify-", name, items, usage)))

    async def predict(self, request: Request) -> Response:
        """TEI's ``/predict``: classes of a text, of a pair, or of a list of either."""
        body = await self._runner.body(request)
        asked = await run_sized(lambda: _read_tei(body), len(body))
        model = await self._runner.model(None, PoolingTask.CLASSIFY, PoolingTask.SCORE)
        given, is_list = asked.inputs, True
        if isinstance(given, str):
            given, is_list = [given], False
        elif isinstance(given, list) and len(given) == 2 and all(isinstance(each, str) for each in given):
            given, is_list = [given], False  # a pair
        if not isinstance(given, list) or not given or len(given) > MOST_INPUTS:
            refuse(f"inputs must be a text, a pair, or 1 to {MOST_INPUTS} of them in a list.", "inputs")
        items = [_predicted(index, each) for index, each in enumerate(given)]
        activation = False if asked.raw_scores else None
        assert model.served.pooling is not None
        task = next(
            each for each in (PoolingTask.CLASSIFY, PoolingTask.SCORE) if each in model.served.pooling.tasks
        )
        cutting = tei_cutting(asked)
        if len({len(each) for each in items}) > 1:
            refuse("inputs must be texts or pairs, not both.", "inputs")
        if len(items[0]) == 2:
            pairs = [(each[0], each[1]) for each in items]
            inputs = await run_sized(lambda: pairs_of(pairs, model, cutting, "inputs"), len(body))
        else:
            inputs = await tokenised(model, [each[0] for each in items], cutting, "inputs")
        found = await self._runner.run(request, inputs, PoolingParams(task, activation=activation), None)
        labels = [
            [wire.TeiLabel(each, _label(i, model)) for i, each in enumerate(floats(pooled))]
            for pooled in found
        ]
        for each in labels:
            each.sort(key=lambda label: -label.score)
        return json_response(encode(labels if is_list else labels[0]))

    async def _scores(
        self,
        request: Request,
        model: TextModel,
        asked: wire.ScoringRequest,
        pairs: Sequence[tuple[str, str]],
        cutting: Cutting,
        param: str,
        *,
        activation: bool | None,
    ) -> tuple[list[float], wire.PooledUsage]:
        """Scores of pairs: a cross-encoder's, else the cosine of two embeddings.

        Raises:
            ApiError: the model cannot honour the instruction or the activation (400).
        """
        pooling = model.served.pooling
        assert pooling is not None
        if asked.chat_template_kwargs:
            refuse("chat_template_kwargs is not supported: use instruction.", "chat_template_kwargs")
        instruction = asked.instruction or ""
        is_cosine = PoolingTask.SCORE not in pooling.tasks or not pooling.takes_pairs
        if instruction and (is_cosine or not pooling.answer_tokens):
            refuse("This model takes no instruction: put it into the query, or leave it out.", "instruction")
        if is_cosine and activation:
            name = next(each for each in ACTIVATIONS if getattr(asked, each))
            refuse("This model's scores are cosines, which have no activation.", name)
        size = sum(len(first) + len(second) for first, second in pairs)
        if asked.max_tokens_per_query or asked.max_tokens_per_doc:
            pairs = await run_sized(lambda: _cut_pairs(pairs, asked, model), size)
        if is_cosine:
            return await self._cosines(pairs, request, model, cutting, param)
        inputs = await run_sized(
            lambda: pairs_of(pairs, model, cutting, param, instruction=instruction), size
        )
        params = PoolingParams(PoolingTask.SCORE, activation=activation)
        found = await self._runner.run(request, inputs, params, model.name)
        num_tokens = sum(len(each.ids) for each in inputs)
        return [floats(each)[0] for each in found], wire.PooledUsage(num_tokens, num_tokens)

    async def _cosines(
        self,
        pairs: Sequence[tuple[str, str]],
        request: Request,
        model: TextModel,
        cutting: Cutting,
        param: str,
        *,
        prompt: str = "",
    ) -> tuple[list[float], wire.PooledUsage]:
        """Cosines of the embeddings of pairs; each text is embedded once."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        embedded = await self._embedding.embed(request, model, texts, cutting, param, prompt=prompt)
        vectors = dict(zip(texts, embedded.floats(), strict=True))
        size = sum(len(each.values) for each in embedded.found)

        def cosines() -> list[float]:
            norms = {text: math.sqrt(math.fsum(map(mul, each, each))) for text, each in vectors.items()}
            return [
                math.fsum(map(mul, vectors[first], vectors[second])) / (norms[first] * norms[second] or 1.0)
                for first, second in pairs
            ]

        return await run_sized(cosines, size), embedded.usage


def _given(asked: wire.ScoreRequest, names: Sequence[str]) -> str:
    """The name of a field that a request has; the first one if none."""
    found = [each for each in names if getattr(asked, each) is not None]
    if len(found) > 1:
        refuse(f"{' and '.join(found)} mean the same: give one.", found[-1])
    return found[0] if found else names[0]


def _texts(given: Any, param: str) -> list[str]:
    """Texts of a field that takes no token ids."""
    found = texts_of(given or [], param)
    texts = [each for each in found if isinstance(each, str)]
    if len(texts) < len(found):
        refuse(f"{param} must be texts.", param)
    return texts


def _cut_pairs(
    pairs: Sequence[tuple[str, str]], asked: wire.ScoringRequest, model: TextModel
) -> list[tuple[str, str]]:
    """Pairs whose queries and documents have as many tokens as a request allows."""
    limits = (asked.max_tokens_per_query, asked.max_tokens_per_doc)
    firsts, seconds = (
        {text: shortened(text, most, model) if most else text for text in texts}
        for texts, most in zip(map(dict.fromkeys, zip(*pairs, strict=True)), limits, strict=True)
    )
    return [(firsts[first], seconds[second]) for first, second in pairs]


def shortened(text: str, most: int, model: TextModel) -> str:
    """The beginning of a text, of at most so many tokens.

    A character of several tokens is kept whole or left out. What is cut may have more tokens than before.
    """
    while True:
        (found,) = model.tokenizer.backend.encode_batch([text], add_special_tokens=False)
        if len(found.ids) <= most:
            return text
        text = text[: min(found.offsets[most - 1][1], found.offsets[most][0], len(text) - 1)]


def _predicted(index: int, given: Any) -> list[str]:
    """An input of ``/predict``: one text, or two."""
    texts = [given] if isinstance(given, str) else given
    is_right = (
        isinstance(texts, list) and 1 <= len(texts) <= 2 and all(isinstance(x, str) and x for x in texts)
    )
    if not is_right:
        refuse(f"inputs[{index}] must be a text or a pair of texts; not empty.", f"inputs[{index}]")
    return list(texts)


def _label(index: int, model: TextModel) -> str:
    pooling = model.served.pooling
    names = pooling.labels if pooling is not None else ()
    return names[index] if index < len(names) else f"LABEL_{index}"
