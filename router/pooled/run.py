"""Run of a pooled request: its inputs on the mesh, and its task checked."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from coordinator.numerics import Numerics
from coordinator.pooled_model import PooledModel, PoolingTask
from engine.pooling_params import Pooled, PoolingParams
from engine.sampling import SamplingParams
from router.api.headers import RequestTerms, client_id_of, read_terms
from router.api.stored_terms import stored_terms
from router.api.streaming import unless_gone
from router.config import HttpConfig
from router.errors import ApiError, bad_request, refuse, too_late
from router.http.body import read_body
from router.http.large_bodies import VERY_LARGE_BODY, run_sized
from router.http.quotas import Quotas
from router.mesh import Generates, Mesh, Prompt, ServedModel
from router.openai_api import GenerationRequest
from router.pooled.batch import MOST_INPUTS, MOST_OF_LINE, PooledBatch
from router.pooled.cache import AnswerNames, PoolingCache
from router.pooled.inputs import PooledTokens
from router.pooled.tei_errors import expect_by_body
from router.pooled.wire import InputsRequest, PooledRequest
from router.text.text_model import TextModel
from router.text.text_models import TextModels

NO_SAMPLING = SamplingParams(max_tokens=1)
ACTIVATIONS = ("use_activation", "activation", "softmax")
"""vLLM's names of one field, the newest first."""


class PooledRunner:
    """Runner of pooled requests, under the quota of the client's key."""

    def __init__(
        self, mesh: Mesh, config: HttpConfig, quotas: Quotas, models: TextModels, cache: PoolingCache
    ) -> None:
        self._mesh = mesh
        self._config = config
        self._quotas = quotas
        self._models = models
        self._cache = cache

    def __repr__(self) -> str:
        return f"<PooledRunner with {self._mesh!r}>"

    async def body(self, request: Request, *, any_type: bool = False) -> bytes:
        """The body of a request, read where the mesh has room.

        Raises:
            ApiError, MeshError: it cannot be read, or there is no room.
        """
        body = await read_body(request, self._config, any_type=any_type)
        expect_by_body(request, body)
        self._mesh.check_room()
        return body

    async def model(self, name: str | None, *tasks: PoolingTask) -> TextModel:
        """The text side of the model, which does one of the tasks.

        Raises:
            ApiError: there is no such model (404), or it does none of them (400).
        """
        model = await self._models.get(name)
        check_tasks(model.served, tasks)
        return model

    async def run(
        self, request: Request, inputs: Sequence[PooledTokens], params: PoolingParams, name: str | None
    ) -> list[Pooled]:
        """The answers to inputs, in their order.

        Raises:
            ApiError, MeshError: one failed.
            ClientGone: nobody waits for them.
        """
        id = request.state.request_id = client_id_of(request, None)
        terms = read_terms(request, id, GenerationRequest(model=name), "")
        stored, num_tokens = stored_terms(request), sum(len(each.ids) for each in inputs)
        is_limited, mesh = stored is None or stored.is_limited, self._mesh if stored is None else stored.mesh
        lease = self._quotas.admit(terms.key, num_tokens) if is_limited else None
        is_refused = True
        try:
            found = await unless_gone(request.receive, self._within(mesh, terms, inputs, params))
            is_refused = False
            return found
        finally:
            if lease is not None:
                lease.end(0, refused=is_refused)

    async def _within(
        self, mesh: Generates, terms: RequestTerms, inputs: Sequence[PooledTokens], params: PoolingParams
    ) -> list[Pooled]:
        """The answers, within the time that the client allows."""
        try:
            async with asyncio.timeout(terms.timeout) as timeout:
                return await self._answers(mesh, terms, inputs, params)
        except TimeoutError as error:
            if terms.timeout is None or not timeout.expired():
                raise
            raise too_late(terms.timeout) from error

    async def _answers(
        self, mesh: Generates, terms: RequestTerms, inputs: Sequence[PooledTokens], params: PoolingParams
    ) -> list[Pooled]:
        """The answers: those that are kept, and those of the mesh to all other inputs."""
        names = await self._names(terms, inputs, params)
        found = dict[int, Pooled]()
        for index, name in enumerate(names):
            if (kept := self._cache.get(name)) is not None:
                found[index] = kept
        others = [index for index in range(len(inputs)) if index not in found]

        def prompt(number: int) -> Prompt:
            index = others[number]
            return _prompt(terms, index, len(inputs), inputs[index], params)

        def keep(number: int, answer: Pooled, computed_in: Numerics | None) -> None:
            index = others[number]
            found[index] = answer
            if names:
                self._cache.put(names[index], answer, computed_in)

        most = MOST_INPUTS if mesh is self._mesh else MOST_OF_LINE
        await pooled_answers(mesh, [len(inputs[each].ids) for each in others], prompt, keep, most)
        return [found[index] for index in range(len(inputs))]

    async def _names(
        self, terms: RequestTerms, inputs: Sequence[PooledTokens], params: PoolingParams
    ) -> list[bytes]:
        """Names of the answers; none where they are neither kept nor looked for.

        A client that names an instance wants it to compute.
        """
        model = self._mesh.model
        if not self._cache.is_on or terms.rank is not None or model is None:
            return []
        if not self._cache.use(self._mesh.numerics().keys()):
            return []
        names = AnswerNames(model, params)
        # Not where one works at a time: tokenising takes long there, and this does not.
        size = min(8 * sum(len(each.ids) for each in inputs), VERY_LARGE_BODY)
        return await run_sized(lambda: [names.name(each.ids, each.type_ids) for each in inputs], size)


async def pooled_answers(
    mesh: Generates,
    sizes: Sequence[int],
    prompt_of: Callable[[int], Prompt],
    on_answer: Callable[[int, Pooled, Numerics | None], None],
    most: int = MOST_INPUTS,
) -> list[Pooled]:
    """Answers to inputs of so many tokens each; the first failure ends all.

    At most ``most`` are under way at once. ``prompt_of`` makes the prompt of each; ``on_answer`` is called
    as each is answered, with the numerics class that computed it.
    """
    batch: PooledBatch[Pooled] = PooledBatch(sizes, most)
    running: dict[asyncio.Task[tuple[Pooled, Numerics | None]], int] = {}
    try:
        while not batch.is_complete:
            for index in batch.to_send():
                running[asyncio.create_task(_pooled(mesh, prompt_of(index)))] = index
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = running.pop(task)
                answer, computed_in = task.result()
                batch.take(index, answer)
                on_answer(index, answer, computed_in)
        return batch.answers()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _pooled(mesh: Generates, prompt: Prompt) -> tuple[Pooled, Numerics | None]:
    """An answer, and the numerics class that computed it."""
    generation = mesh.generate(prompt)
    with contextlib.closing(generation):
        async for delta in generation:
            if delta.pooled is not None:
                return delta.pooled, generation.first_class
            if delta.finish_reason is not None:
                raise ApiError(500, f"The input could not be computed: {delta.error or 'no result'}.")
    raise ApiError(500, "The request ended without a result.")


def check_tasks(served: ServedModel, tasks: Sequence[PoolingTask]) -> PooledModel:
    """Refuse a request for tasks of which the model does none.

    Raises:
        ApiError: the message names the endpoint that it has (400).
    """
    pooling = served.pooling
    if pooling is None:
        raise bad_request(
            "This model generates text: ask /v1/chat/completions or /v1/completions, or serve a model with "
            "--runner pooling.",
            "model",
        )
    if not any(task in pooling.tasks for task in tasks):
        refuse(f"This model does {pooling.offer}, not {' or '.join(tasks)}.", "model")
    return pooling


def check_dimensions(dimensions: int | None, pooling: PooledModel, param: str = "dimensions") -> int:
    """The length to which embeddings are cut; 0 for the model's own.

    Raises:
        ApiError: the model has no embeddings of that length (400).
    """
    if dimensions is None or dimensions == pooling.dimensions:
        return 0
    if not pooling.cuts_to(dimensions):
        allowed = ", ".join(map(str, sorted({*pooling.matryoshka, pooling.dimensions})))
        any_up_to = f"any up to {pooling.dimensions}" if pooling.cuts_anywhere else allowed
        refuse(f"{param} {dimensions}: this model's embeddings have {any_up_to}.", param)
    return dimensions


def params_of(asked: InputsRequest, task: PoolingTask, pooling: PooledModel) -> PoolingParams:
    """Parameters of a request for embeddings, or for classes or scores.

    Raises:
        ApiError: its fields contradict each other, or belong to other tasks (400).
    """
    if task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED):
        normalize = activation_of(asked, asked.normalize, "normalize")
        return PoolingParams(
            task, dimensions=check_dimensions(asked.dimensions, pooling), normalize=normalize
        )
    for name in ("dimensions", "normalize"):
        if getattr(asked, name) is not None:
            refuse(f"{name} is a field of requests for embeddings; this one is for {task}.", name)
    return PoolingParams(task, activation=activation_of(asked))


def activation_of(asked: PooledRequest, other: bool | None = None, name: str = "") -> bool | None:
    """Whether results are probabilities or normalised; None: as the model does.

    ``other`` is the value of a further field, of this ``name``.

    Raises:
        ApiError: fields contradict each other (400).
    """
    given = {each: getattr(asked, each) for each in ACTIVATIONS}
    values = {each for each in (*given.values(), other) if each is not None}
    if len(values) > 1:
        names = [each for each, value in (given | {name: other}).items() if value is not None]
        refuse(f"{' and '.join(names)} contradict each other.", names[-1])
    return next(iter(values), None)


def numbers(pooled: Pooled) -> Any:
    """Numbers of an answer as lists, by its shape."""
    values = floats(pooled)
    if len(pooled.shape) < 2:
        return values
    width = pooled.shape[1]
    return [values[begin : begin + width] for begin in range(0, len(values), width)]


def floats(pooled: Pooled) -> list[float]:
    """All numbers of an answer, one after the other."""
    return array("f", pooled.values).tolist()


def _prompt(
    terms: RequestTerms, index: int, count: int, given: PooledTokens, params: PoolingParams
) -> Prompt:
    return Prompt(
        request_id=terms.id if count == 1 else f"{terms.id}-{index}",
        prompt_ids=given.ids,
        params=NO_SAMPLING,
        seed=0,
        rank=terms.rank,
        preferred=terms.preferred if count == 1 else None,
        session=terms.session if count == 1 else "",
        repeatable=True,
        pooling=msgspec.structs.replace(params, token_type_ids=given.type_ids),
    )
