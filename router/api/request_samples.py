"""Samples for the mesh from a validated request (pure but for the seeds)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from engine.sampling import SamplingParams
from router.api.parameters import room_for
from router.api.prompts import PromptText
from router.errors import refuse
from router.mesh import Prompt
from router.openai_api import CompletionRequest, GenerationRequest
from router.recorded import Recorder, with_logprobs
from router.text.output_stream import OutputStream
from router.text.stops import StopStrings
from router.text.text_model import TextModel

UNPREDICTABLE = random.SystemRandom()

MAX_SAMPLES = 1024
"""Prompts times ``n`` of one request."""
MAX_PROMPT_LOGPROBS = 1 << 22
"""Most log-probabilities of a request's prompts, times ``n``.

They take most of a gigabyte while the answer is made.
"""


def make_samples(
    id: str,
    request: GenerationRequest,
    params: SamplingParams,
    prompts: Sequence[PromptText],
    model: TextModel,
    rank: int | None,
    chance: random.Random = UNPREDICTABLE,
    session: str = "",
    traceparent: str = "",
    *,
    may_be_cut: bool = False,
    records: bool = False,
    preferred: int | None = None,
) -> list[OutputStream]:
    """``n`` samples of each prompt, in the order of the answer's choices.

    ``chance`` draws the seeds of requests that bring none. ``may_be_cut``: the end of an instance's context
    may end them before the tokens that were asked for are there. ``records``: each has a recorder.
    ``preferred``: the instance that a single sample goes to if it can.
    """
    if len(prompts) * params.n > MAX_SAMPLES:
        refuse(f"prompts times n may be at most {MAX_SAMPLES}.", "n")
    prompt_logprobs = _prompt_logprobs(request, params)
    _check_prompt_logprobs(request, params.n, prompts, prompt_logprobs)
    stops = StopStrings(params.stop) if params.stop else None
    alone = len(prompts) * params.n == 1
    draws_seeds = isinstance(chance, random.SystemRandom)
    repeatable = records or params.greedy or params.seed is not None or not draws_seeds
    samples: list[OutputStream] = []
    for prompt in prompts:
        seed = chance.getrandbits(63) if params.seed is None else params.seed
        max_tokens = room_for(prompt, request, params, model)
        instance_params = for_instances(params, max_tokens, prompt_logprobs)
        for sample_index in range(params.n):
            index = len(samples)
            wanted = Prompt(
                request_id=id if alone else f"{id}-{index}",
                prompt_ids=prompt.ids,
                params=instance_params,
                seed=seed,
                asked=max_tokens if params.max_tokens and not may_be_cut else 0,
                sample_index=sample_index,
                rank=rank,
                preferred=preferred if alone else None,
                priority=request.priority or 0,
                cache_salt=request.cache_salt or "",
                session=session,
                traceparent=traceparent,
                repeatable=repeatable,
            )
            samples.append(
                OutputStream(
                    index,
                    with_logprobs(wanted) if records else wanted,
                    params,
                    model.tokenizer,
                    prompt_text=prompt.text,
                    prompt_offsets=prompt.offsets,
                    stops=stops,
                    recorder=Recorder() if records else None,
                )
            )
    return samples


def _check_prompt_logprobs(
    request: GenerationRequest, n: int, prompts: Sequence[PromptText], most: int | None
) -> None:
    """Refuse more log-probabilities of prompts than one answer may hold.

    ``most`` is the number for each token.
    """
    if most is None:
        return
    num_tokens = sum(len(prompt.ids) for prompt in prompts) * n
    if num_tokens * (1 + most) > MAX_PROMPT_LOGPROBS:
        name = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        refuse(
            f"{name} {most} for {num_tokens} tokens of prompts (n times each) are {num_tokens * (1 + most)} "
            f"log-probabilities; one answer tells at most {MAX_PROMPT_LOGPROBS}: ask for fewer.",
            name,
        )


def for_instances(params: SamplingParams, max_tokens: int, prompt_logprobs: int | None) -> SamplingParams:
    """Parameters for an instance: one sample, without the text side.

    At least one token is generated.
    """
    return msgspec.structs.replace(
        params,
        n=1,
        seed=None,
        stop=(),
        max_tokens=max(1, max_tokens),
        logprobs=params.logprobs if max_tokens else None,
        prompt_logprobs=prompt_logprobs,
    )


def _prompt_logprobs(request: GenerationRequest, params: SamplingParams) -> int | None:
    """Number of log-probabilities per prompt token, for themselves or in the echoed prompt."""
    echoed = isinstance(request, CompletionRequest) and request.echo
    counts = [params.prompt_logprobs, params.logprobs if echoed else None]
    return max((count for count in counts if count is not None), default=None)
