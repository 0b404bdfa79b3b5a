"""What the offline class does with a pooling model: embeddings, scores, classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from coordinator.numerics import Numerics
from coordinator.pooled_model import PooledModel, PoolingTask
from engine.pooling_params import Pooled, PoolingParams
from router.errors import ApiError
from router.mesh import Mesh, MeshError, Prompt
from router.offline.progress import progress_bar
from router.offline.run import GenerationError
from router.pooled.inputs import Cutting, PooledTokens, inputs_of, pairs_of, prompt_named
from router.pooled.run import NO_SAMPLING, check_dimensions, check_tasks, pooled_answers
from router.text.text_model import TextModel

if TYPE_CHECKING:
    from router.offline.mesh import PrivateMesh

Floats = npt.NDArray[np.float32]
Texts = str | list[int] | Sequence[str | list[int]]


class PooledParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of :meth:`PoolingCalls.embed` and its like, with vLLM's names."""

    dimensions: int | None = None
    """Length to which embeddings are cut, where the model allows it."""
    truncate_prompt_tokens: int | None = None
    """Tokens to which inputs are cut, -1 for the model's most; None: none is cut."""
    use_activation: bool | None = None
    """Whether embeddings get the length 1, and others are probabilities; None: as the model does."""
    prompt_name: str | None = None
    """Name of the model's prompt before each text; None: its default."""


@dataclass
class PoolingOutput:
    """Numbers of one input, by task: [numbers] or [tokens, numbers]."""

    data: Floats


@dataclass
class EmbeddingOutput:
    """Embedding of one input."""

    embedding: list[float]


@dataclass
class ClassificationOutput:
    """Probability of each label."""

    probs: list[float]


@dataclass
class ScoringOutput:
    """Score of a pair."""

    score: float


Output = TypeVar("Output")


@dataclass
class PoolingRequestOutput(Generic[Output]):
    """Answer to one input."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    finished: bool = True


class PoolingCalls:
    """Methods of :class:`router.offline.llm.LLM` for pooling models.

    All give one output for each input, in order, and raise ``ValueError`` for what the model cannot answer.
    """

    _mesh: PrivateMesh
    _model: TextModel

    def embed(
        self, prompts: Texts, *, pooling_params: PooledParams | None = None, use_tqdm: Any = True
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Embeddings of texts, or of lists of token ids."""
        found = self._pool(prompts, PoolingTask.EMBED, pooling_params, use_tqdm)
        return _made(found, lambda values: EmbeddingOutput(values.tolist()))

    def classify(
        self, prompts: Texts, *, pooling_params: PooledParams | None = None, use_tqdm: Any = True
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Probabilities of the model's labels."""
        found = self._pool(prompts, PoolingTask.CLASSIFY, pooling_params, use_tqdm)
        return _made(found, lambda values: ClassificationOutput(values.tolist()))

    def encode(
        self,
        prompts: Texts,
        pooling_params: PooledParams | None = None,
        *,
        pooling_task: str = "",
        use_tqdm: Any = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Numbers of a task; empty: the model's own."""
        pooling = self._pooling(*([PoolingTask(pooling_task)] if pooling_task else PoolingTask))
        task = PoolingTask(pooling_task) if pooling_task else pooling.tasks[0]
        return _made(self._pool(prompts, task, pooling_params, use_tqdm), PoolingOutput)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PooledParams | None = None,
        use_tqdm: Any = True,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Scores of pairs: one text with many, or as many of both.

        They are a cross-encoder's, or else cosines of embeddings.
        """
        first, second = ([each] if isinstance(each, str) else list(each) for each in (data_1, data_2))
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second) or not first:
            raise ValueError(f"{len(first)} texts have {len(second)} others: give one text, or as many")
        pooling = self._pooling(PoolingTask.SCORE, PoolingTask.EMBED)
        if PoolingTask.SCORE not in pooling.tasks or not pooling.takes_pairs:
            texts = list(dict.fromkeys([*first, *second]))
            found = self.embed(texts, pooling_params=pooling_params, use_tqdm=use_tqdm)
            by_text = dict(zip(texts, found, strict=True))
            return [
                _cosine(by_text[one], by_text[other], number)
                for number, (one, other) in enumerate(zip(first, second, strict=True))
            ]
        asked = pooling_params or PooledParams()
        cutting = Cutting(asked.truncate_prompt_tokens)
        pairs = list(zip(first, second, strict=True))
        inputs = _in_words(lambda: pairs_of(pairs, self._model, cutting, "pairs"))
        params = PoolingParams(PoolingTask.SCORE, activation=asked.use_activation)
        return _made(self._answers(inputs, params, use_tqdm), lambda values: ScoringOutput(float(values[0])))

    # ---- helpers

    def _pooling(self, *tasks: PoolingTask) -> PooledModel:
        return _in_words(lambda: check_tasks(self._model.served, tasks))

    def _pool(
        self, prompts: Texts, task: PoolingTask, given: PooledParams | None, use_tqdm: Any
    ) -> list[tuple[PooledTokens, Pooled]]:
        pooling, asked = self._pooling(task), given or PooledParams()
        is_one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        texts: Any = [prompts] if is_one else list(prompts)
        if not texts or not all(texts):
            raise ValueError("prompts must be texts or lists of token ids; none may be empty")
        embeds = task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
        params = PoolingParams(
            task,
            dimensions=_in_words(lambda: check_dimensions(asked.dimensions, pooling)) if embeds else 0,
            normalize=asked.use_activation if embeds else None,
            activation=None if embeds else asked.use_activation,
        )

        def inputs() -> list[PooledTokens]:
            prompt = prompt_named(asked.prompt_name, self._model) if embeds else ""
            cutting = Cutting(asked.truncate_prompt_tokens)
            return inputs_of(texts, self._model, cutting, "prompts", prompt=prompt)

        return self._answers(_in_words(inputs), params, use_tqdm)

    def _answers(
        self, inputs: Sequence[PooledTokens], params: PoolingParams, use_tqdm: Any
    ) -> list[tuple[PooledTokens, Pooled]]:
        if not self._mesh.is_alive:
            raise self._mesh.dead()
        with progress_bar(len(inputs), use_tqdm) as on_output:

            def on_answer(index: int, *_: object) -> None:
                on_output(PoolingRequestOutput(str(index), (), inputs[index].ids))

            found = self._mesh.call(run_pooled(self._mesh.client, inputs, params, on_answer))
        return list(zip(inputs, found, strict=True))


async def run_pooled(
    mesh: Mesh,
    inputs: Sequence[PooledTokens],
    params: PoolingParams,
    on_answer: Callable[[int, Pooled, Numerics | None], None],
) -> list[Pooled]:
    """Answers to inputs in their order.

    Raises:
        ValueError: an input cannot be answered.
        GenerationError: the mesh could not answer one.
    """

    def prompt(index: int) -> Prompt:
        given = inputs[index]
        return Prompt(
            request_id=f"{id(inputs)}-{index}",
            prompt_ids=given.ids,
            params=NO_SAMPLING,
            seed=0,
            repeatable=True,
            pooling=msgspec.structs.replace(params, token_type_ids=given.type_ids),
        )

    try:
        return await pooled_answers(mesh, [len(each.ids) for each in inputs], prompt, on_answer)
    except (ApiError, MeshError) as error:
        kind = ValueError if error.status < 500 else GenerationError
        raise kind(str(error)) from error


def _made(
    found: Sequence[tuple[PooledTokens, Pooled]], make: Callable[[Floats], Output]
) -> list[PoolingRequestOutput[Output]]:
    return [
        PoolingRequestOutput(
            str(number), make(np.frombuffer(pooled.values, np.float32).reshape(pooled.shape)), given.ids
        )
        for number, (given, pooled) in enumerate(found)
    ]


def _cosine(
    one: PoolingRequestOutput[EmbeddingOutput], other: PoolingRequestOutput[EmbeddingOutput], number: int
) -> PoolingRequestOutput[ScoringOutput]:
    left, right = (np.array(each.outputs.embedding) for each in (one, other))
    score = float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right) or 1.0))
    ids = [*one.prompt_token_ids, *other.prompt_token_ids]
    return PoolingRequestOutput(str(number), ScoringOutput(score), ids)


def _in_words(work: Callable[[], Output]) -> Output:
    """The result of a check whose errors are the endpoints'."""
    try:
        return work()
    except ApiError as error:
        raise ValueError(str(error)) from error
