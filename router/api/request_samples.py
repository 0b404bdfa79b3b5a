"""Third stage of a request: its samples for the mesh (pure but for the seeds)."""

from __future__ import annotations

import random

import msgspec

from engine.sampling import SamplingParams
from router.api.headers import RequestTerms
from router.api.prompts import too_long
from router.api.understanding import Understood
from router.errors import refuse
from router.mesh import Prompt
from router.openai_api import ChatRequest, CompletionRequest
from router.recorded import Recorder, with_logprobs
from router.text.output_stream import OutputStream
from router.text.prompt_text import PromptText
from router.text.stops import StopStrings
from router.text.text_models import no_such_model

UNPREDICTABLE = random.SystemRandom()

MAX_SAMPLES = 1024
"""Prompts times ``n`` of one request."""
MOST_PIXEL_BYTES = 16 << 20
"""Image bytes of a capsule."""
MAX_PROMPT_LOGPROBS = 1 << 22
"""Log-probabilities of prompts, times ``n``.

They take most of a gigabyte.
"""


def make_samples(
    understood: Understood,
    terms: RequestTerms,
    chance: random.Random = UNPREDICTABLE,
    *,
    may_be_cut: bool = False,
) -> list[OutputStream]:
    """``n`` samples of each prompt, in the order of the answer's choices.

    ``chance`` draws the seeds of requests that bring none. ``may_be_cut``: the end of an instance's context
    may end them before the tokens that were asked for are there.
    """
    params, tokenizer = understood.params, understood.model.tokenizer
    count = len(understood.prompts) * params.n
    if count > MAX_SAMPLES:
        refuse(f"prompts times n may be at most {MAX_SAMPLES}.", "n")
    prompt_logprobs = _prompt_logprobs(understood)
    name = understood.wanted.model or ""
    try:
        adapter = understood.model.served.adapter_of(name)
    except LookupError as error:  # it was unloaded a moment ago
        raise no_such_model(name) from error
    stops = StopStrings(params.stop) if params.stop else None
    repeatable = terms.records or params.greedy or not isinstance(chance, random.SystemRandom)
    samples: list[OutputStream] = []
    for prompt in understood.prompts:
        if terms.records:
            _check_pixels(prompt)
        seed = chance.getrandbits(63) if params.seed is None else params.seed
        max_tokens = _room_for(prompt, understood)
        single = Prompt(
            request_id=terms.id,
            prompt_ids=prompt.ids,
            params=for_instances(params, max_tokens, prompt_logprobs),
            seed=seed,
            asked=max_tokens if params.max_tokens and not may_be_cut else 0,
            rank=terms.rank,
            preferred=terms.preferred if count == 1 else None,
            priority=understood.wanted.priority or 0,
            cache_salt=understood.wanted.cache_salt or "",
            adapter=adapter,
            images=prompt.images,
            scored_from=min(_scored_from(understood), len(prompt.ids)),
            routed_experts=_wants_experts(understood),
            session=terms.session,
            traceparent=terms.traceparent,
            repeatable=repeatable or params.seed is not None,
        )
        for sample_index in range(params.n):
            index = len(samples)
            id = terms.id if count == 1 else f"{terms.id}-{index}"
            wanted = msgspec.structs.replace(single, request_id=id, sample_index=sample_index)
            recorder = Recorder(logprobs=terms.records_logprobs) if terms.records else None
            if recorder is not None and terms.records_logprobs:
                wanted = with_logprobs(wanted)
            samples.append(
                OutputStream(index, wanted, params, tokenizer, shown=prompt, stops=stops, recorder=recorder)
            )
    return samples


def _check_pixels(prompt: PromptText) -> None:
    """Refuse a capsule of large images: while a router writes them, its other answers wait."""
    size = sum(each.num_bytes for each in prompt.images)
    if size > MOST_PIXEL_BYTES:
        refuse(
            f"A capsule holds up to {MOST_PIXEL_BYTES >> 20} MiB of images as the encoder gets them, and "
            f"these have {size / 2**20:.1f} MiB: leave X-Lockstep-Capsule out.",
            "messages",
        )


def _wants_experts(understood: Understood) -> bool:
    wanted = understood.wanted
    return isinstance(wanted, CompletionRequest) and wanted.return_routed_experts is True


def _scored_from(understood: Understood) -> int:
    """First prompt token with a log-probability; an echoed prompt has all."""
    wanted = understood.wanted
    if not isinstance(wanted, CompletionRequest) or wanted.echo:
        return 0
    return wanted.prompt_logprobs_from or 0


def _room_for(prompt: PromptText, understood: Understood) -> int:
    """Number of tokens to generate: as requested, or what default and context allow."""
    request, params, model = understood.wanted, understood.params, understood.model
    room = model.served.max_model_len - len(prompt.ids)
    if params.max_tokens is not None and params.max_tokens > room:
        raise too_long(len(prompt.ids), params.max_tokens, request, model)
    most = room if model.most_tokens is None else min(room, model.most_tokens)
    is_chat = isinstance(request, ChatRequest)
    default = model.defaults.get("max_tokens") if is_chat else request.default_max_tokens
    wanted = params.max_tokens if params.max_tokens is not None else default
    count = most if wanted is None else min(most, int(wanted))
    if params.min_tokens > count:
        refuse(f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({count}).", "min_tokens")
    return count


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


def _prompt_logprobs(understood: Understood) -> int | None:
    """Number of log-probabilities per prompt token, for themselves or in the echoed prompt.

    Raises:
        ApiError: they are more than one answer may hold.
    """
    wanted, params = understood.wanted, understood.params
    echoed = isinstance(wanted, CompletionRequest) and wanted.echo
    counts = [params.prompt_logprobs, params.logprobs if echoed else None]
    most = max((count for count in counts if count is not None), default=None)
    if most is None:
        return None
    num_tokens = sum(len(prompt.ids) for prompt in understood.prompts) * params.n
    if num_tokens * (1 + most) > MAX_PROMPT_LOGPROBS:
        name = "logprobs" if wanted.prompt_logprobs is None else "prompt_logprobs"
        refuse(
            f"{name} {most} for {num_tokens} tokens of prompts (n times each) are {num_tokens * (1 + most)} "
            f"log-probabilities; one answer holds at most {MAX_PROMPT_LOGPROBS}: ask for fewer.",
            name,
        )
    return most
