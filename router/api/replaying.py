"""Endpoint that computes a sample of a capsule again: ``POST /v1/replay``.

The body is checked like that of any client: a capsule may come from anybody.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from coordinator.numerics import NATIVE_KINDS, TORCH, Numerics
from engine.sampling import BadParameter, SamplingParams, ThinkingBudget
from router.api.answering import Answering
from router.api.answers import encode, json_response
from router.api.capsules import model_of
from router.api.headers import RequestTerms, key_of
from router.api.parameters import MAX_STOP_CHARACTERS, MIN_TEMPERATURE
from router.api.prompts import check_vocabulary
from router.api.request_samples import for_instances
from router.api.streaming import whole_answer
from router.capsule import CapsuleModel, ReplayAnswer, ReplayRequest
from router.errors import ApiError, bad_request, refuse
from router.http.body import decoder
from router.http.large_bodies import run_sized
from router.images.replayed import MOST_PIXELS, taken_from
from router.mesh import Mesh, Prompt, ServedModel
from router.recorded import Recorder, with_logprobs
from router.text.output_stream import OutputStream
from router.text.stops import StopStrings
from router.text.text_model import TextModel
from router.text.text_models import TextModels
from router.turns.grammar_check import GrammarCheck

logger = logging.getLogger(__name__)

MAX_THINKING_TOKENS = 4096
"""Tokens of all marks of a reasoning budget."""
NOT_HERE = {"x-should-retry": "false"}
OTHER_TEMPLATE = "the router has another chat template now: the same messages may give another prompt"

_read_replay = decoder(ReplayRequest)


class Replaying:
    """Handler of ``POST /v1/replay``."""

    def __init__(self, mesh: Mesh, models: TextModels, answering: Answering) -> None:
        self._mesh = mesh
        self._models = models
        self._answering = answering
        self._grammars = GrammarCheck()
        self._turn = itertools.count()

    def __repr__(self) -> str:
        return f"<Replaying with {self._models!r}>"

    async def replay(self, request: Request) -> Response:
        body = await self._answering.receive_body(request)
        wanted = await run_sized(lambda: _read_replay(body), len(body))
        model = await self._models.get(None)
        remarks = check_model(wanted.model, model_of(model))
        ranks = ranks_of(wanted.numerics, self._mesh.numerics())
        ranks = [rank for rank in ranks if rank in self._mesh.reports()] or ranks  # others still load
        check_sample(wanted, model.served)
        check_adapter(wanted, model.served)
        if wanted.params.grammar is not None:
            await self._grammars.check_unchanged(wanted.params.grammar, "params.grammar")
        rank = ranks[next(self._turn) % len(ranks)]
        terms = RequestTerms(id=f"replay-{request.state.request_id}", key=key_of(request), rank=rank)
        sample = await run_sized(lambda: sample_of(wanted, model, terms, Recorder()), len(body))

        def body_of(_: object) -> bytes:
            return encode(
                ReplayAnswer(
                    system_fingerprint=sample.fingerprint,
                    dp_rank=rank,
                    result=sample.recorded,
                    numerics_changes=tuple(sample.numerics_changes),
                    weight_spans=tuple(sample.weight_spans),
                    remarks=remarks,
                )
            )

        run = self._answering.admitted(request, [sample], len(wanted.prompt_ids), terms)
        return json_response(await whole_answer(run, body_of, request.receive))


def check_model(wanted: CapsuleModel, served: CapsuleModel) -> tuple[str, ...]:
    """Refuse a capsule of another model or tokenizer: its tokens would mean something else.

    Returns a remark if its chat template is another one. The prompt's tokens are in the capsule, so they do
    not depend on that.

    Raises:
        ApiError: it is of another one (409).
    """
    problem = None
    if wanted.fingerprint != served.fingerprint:
        problem = (
            f"the capsule is of model {wanted.name[:100]} (checkpoint {wanted.fingerprint[:64]}), and this "
            f"mesh serves {served.name} (checkpoint {served.fingerprint}): replay it on a mesh of its model."
        )
    elif wanted.tokenizer != served.tokenizer:
        problem = (
            f"the capsule was made with another tokenizer (digest {wanted.tokenizer[:64]}) than this router "
            f"has (digest {served.tokenizer}): start it with the same --tokenizer and files."
        )
    if problem is not None:
        raise ApiError(409, problem, param="model", headers=NOT_HERE)
    return () if wanted.chat_template == served.chat_template else (OTHER_TEMPLATE,)


def ranks_of(wanted: Numerics, classes: Mapping[Numerics, list[int]]) -> list[int]:
    """Ranks of the instances of a numerics class.

    Raises:
        ApiError: there is none (409).
    """
    for each, ranks in classes.items():
        if each.fingerprint == wanted.fingerprint:
            return ranks
    weights = sorted({each.weights for each in classes})
    if weights and wanted.weights not in weights:
        raise ApiError(
            409,
            f"the capsule is of other weights (digest {wanted.weights[:64]}) than this mesh serves (digest "
            f"{', '.join(weights)}): replay it on a mesh of its model.",
            param="model",
            headers=NOT_HERE,
        )
    here = ", ".join(map(str, classes)) or "none that is known"
    shown = f"{wanted.fingerprint[:64]} ({wanted.kernels[:40]} kernels, {wanted.dtype[:40]})"
    flags = "the same --dtype and --numerics"
    if wanted.kernels in (*NATIVE_KINDS, TORCH):
        flags = f"--dtype {wanted.dtype[:40]} --numerics {wanted.kernels}"
    raise ApiError(
        409,
        f"the capsule is of numerics class {shown}, and this mesh has {here}: replay it where instances have "
        f"its class. They need {flags}, the same -tp, and the same versions of Lockstep and torch.",
        param="numerics",
        headers=NOT_HERE,
    )


def check_sample(wanted: ReplayRequest, served: ServedModel) -> None:
    """Refuse a sample that no capsule of this mesh's model can hold."""
    params, prompt_ids = wanted.params, wanted.prompt_ids
    if params.n != 1 or params.seed is not None:
        refuse("params.n must be 1 and params.seed unset: each sample is replayed by itself.", "params")
    if params.logprobs is not None or params.prompt_logprobs is not None:
        refuse("params.logprobs and params.prompt_logprobs must be unset.", "params")
    if not -(2**63) <= int(wanted.seed) < 2**63:
        refuse("seed must fit in 64 bits.", "seed")
    if not prompt_ids:
        refuse("prompt_ids must not be empty.", "prompt_ids")
    check_vocabulary(prompt_ids, served, "prompt_ids")
    _check_length(len(prompt_ids), params.max_tokens, served)
    try:
        params.check(vocab_size=served.vocab_size)
    except BadParameter as error:
        raise bad_request(str(error), f"params.{error.param}") from error
    _check_sizes(params, served.vocab_size)


def check_adapter(wanted: ReplayRequest, served: ServedModel) -> None:
    """Refuse a sample of an adapter that is not served here, or of another ``-tp``.

    Raises:
        ApiError: see above (409).
    """
    if (adapter := wanted.adapter) is None:
        return
    problem = None
    if not any(each.digest == adapter.digest for each in served.adapters):
        problem = (
            f"the capsule is of an adapter with the digest {adapter.digest[:64]}, which is not served here: "
            "name its directory with --lora-modules."
        )
    elif adapter.ranks != served.ranks:
        problem = (
            f"the capsule is of an adapter with -tp {adapter.ranks}, and this is -tp {served.ranks}: an "
            f"adapter's bits depend on it, so replay it on a mesh with -tp {adapter.ranks}."
        )
    if problem is not None:
        raise ApiError(409, problem, param="adapter", headers=NOT_HERE)


def _check_length(num_prompt: int, max_tokens: int | None, served: ServedModel) -> None:
    context = served.max_model_len
    if max_tokens is None:
        refuse("params.max_tokens must be set.", "params.max_tokens")
    if num_prompt >= context or num_prompt + max_tokens > context:
        refuse(
            f"the prompt of {num_prompt} tokens and max_tokens of {max_tokens} exceed the context length of "
            f"{context}: replay it on a mesh with a larger --max-model-len.",
            "prompt_ids",
        )


def _check_sizes(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters larger than those of any request can be."""
    if params.top_k > vocab_size or len(params.allowed_token_ids or ()) > vocab_size:
        refuse(f"params.top_k and params.allowed_token_ids exceed {vocab_size} tokens.", "params")
    if 0 < params.temperature < MIN_TEMPERATURE:
        refuse(f"params.temperature must be 0 or at least {MIN_TEMPERATURE:g}.", "params.temperature")
    if max(sum(map(len, params.stop)), sum(map(len, params.bad_words))) > MAX_STOP_CHARACTERS:
        refuse("params.stop or params.bad_words are too long.", "params")
    if (budget := params.thinking) is not None and (
        _size_of(budget) > MAX_THINKING_TOKENS or budget.tokens >= 2**63
    ):
        refuse("params.thinking has too many tokens.", "params.thinking")


def _size_of(budget: ThinkingBudget) -> int:
    return len(budget.begin) + sum(map(len, budget.begin)) + len(budget.end)


def sample_of(
    wanted: ReplayRequest, model: TextModel, terms: RequestTerms, recorder: Recorder
) -> OutputStream:
    """The sample of a capsule, ready to be computed again and recorded.

    Its salt is new, so that nothing is taken from the prefix cache: all of it is computed again.

    Raises:
        ApiError: an image has numbers that no processor writes (400).
    """
    params, max_tokens = wanted.params, wanted.params.max_tokens or 0
    most_pixels = MOST_PIXELS if model.images is None else max(MOST_PIXELS, model.images.most_pixels)
    prompt = Prompt(
        request_id=terms.id,
        prompt_ids=wanted.prompt_ids,
        params=for_instances(params, max_tokens, None),
        seed=int(wanted.seed),
        asked=max_tokens,
        sample_index=wanted.sample_index,
        rank=terms.rank,
        cache_salt=uuid.uuid4().hex,
        adapter="" if wanted.adapter is None else wanted.adapter.digest,
        images=taken_from(wanted.images, most_pixels),
        repeatable=True,
    )
    stops = StopStrings(params.stop) if params.stop else None
    return OutputStream(0, with_logprobs(prompt), params, model.tokenizer, stops=stops, recorder=recorder)
