"""Chats and completions as token ids: what ``/render`` answers, in vLLM's form (pure).

The answer is a body for ``/inference/v1/generate``, which gives the tokens that the request itself would.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.sampling import SamplingParams
from router.api.token_generation import PARAMETERS
from router.api.understanding import Understood
from router.errors import refuse
from router.openai_api import ChatRequest

OWN = PARAMETERS - {"max_tokens", "structured_outputs", "logprobs", "thinking_token_budget"}
"""Parameters that go over as they were given."""


class RenderedRequest(msgspec.Struct, kw_only=True):
    """A request in token ids."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool = False
    cache_salt: str | None = None
    priority: int = 0
    features: None = None
    """Images are not rendered."""


def rendered(understood: Understood, request_id: str) -> list[RenderedRequest]:
    """The prompts of a request, each with its parameters.

    Raises:
        ApiError: it has a grammar, or a budget of reasoning, which token ids cannot carry (400).
    """
    wanted, params = understood.wanted, understood.params
    if params.grammar is not None or params.thinking is not None:
        refuse(
            "a grammar, tools that are forced and a budget of reasoning are not rendered: send the request "
            "itself.",
            "response_format",
        )
    is_one = len(understood.prompts) == 1
    return [
        RenderedRequest(
            request_id=request_id if is_one else f"{request_id}-{index}",
            token_ids=list(prompt.ids),
            sampling_params=_parameters(understood, params),
            model=wanted.model or understood.model.served.names[0],
            stream=bool(wanted.stream),
            cache_salt=wanted.cache_salt,
            priority=wanted.priority or 0,
        )
        for index, prompt in enumerate(understood.prompts)
    ]


def _parameters(understood: Understood, params: SamplingParams) -> dict[str, Any]:
    wanted = understood.wanted
    given = {name: getattr(wanted, name, None) for name in sorted(OWN)}
    given |= {"max_tokens": params.max_tokens, "logprobs": _num_logprobs(understood)}
    return {name: value for name, value in given.items() if value is not None}


def _num_logprobs(understood: Understood) -> int | None:
    wanted = understood.wanted
    if isinstance(wanted, ChatRequest):
        return (wanted.top_logprobs or 0) if wanted.logprobs else None
    return wanted.logprobs
