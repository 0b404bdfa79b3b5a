"""Samples for the mesh from the prompts given to the offline class.

Pure but for the seeds. The way is that of a request to the endpoint: the same checks, tokens and parameters.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.api.headers import RequestTerms
from router.api.parameters import sampling_params
from router.api.prompts import chat_prompt, completion_prompts
from router.api.request_samples import make_samples
from router.api.understanding import Understood
from router.api.validation import check
from router.config import HttpConfig
from router.errors import ApiError, refuse
from router.mesh import MeshError
from router.offline.params import SamplingParams, request_of
from router.openai_api import ChatRequest, CompletionRequest
from router.text.output_stream import OutputStream
from router.text.prompt_text import PromptText
from router.text.text_model import TextModel
from router.turns.grammar_check import checked_grammar
from router.turns.turn_format import TurnFormat

PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class Job(msgspec.Struct, frozen=True):
    """One prompt with its samples to generate, and its request id and parameters."""

    request_id: str
    params: SamplingParams
    prompt: str | None
    """Text of the prompt; None where the user gave token ids."""
    samples: list[OutputStream]


class JobMaker:
    """Makes the jobs of one ``generate`` or ``chat`` call.

    Raises (all methods):
        ApiError: a prompt or a parameter that the model cannot take, in the endpoint's words.
        ValueError, TypeError: something that is no prompt.
    """

    def __init__(self, model: TextModel, max_logprobs: int, chance: random.Random) -> None:
        """``chance`` draws the seeds of prompts whose parameters bring none, in their order."""
        self._model = model
        self._max_logprobs = max_logprobs
        self._chance = chance

    def from_prompt(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        priority: int,
        adapter: str = "",
        *,
        scored_from: int = 0,
    ) -> Job:
        """A job for a text, a list of token ids, or a dictionary with either.

        ``adapter``: name of a low-rank adapter; empty for none. ``scored_from``: first token of the prompt
        that is to have a log-probability, if ``params`` asks for some.
        """
        request = _request(params, priority)
        request.model = adapter or None
        text, ids, salt = _parts(prompt)
        request.prompt = text if ids is None else [*ids]
        request.cache_salt, request.prompt_logprobs_from = salt, scored_from
        if request.max_tokens is not None and request.max_tokens >= self._model.served.max_model_len:
            request.max_tokens = None  # as many as fit, which leave room for a prompt that is to be truncated
        check(request)
        (made,) = completion_prompts(request, self._model)
        return self._job(request_id, request, params, made, text)

    def from_messages(
        self,
        request_id: str,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        adapter: str = "",
        **fields: Any,
    ) -> Job:
        """A job for a conversation. ``fields`` are those of a chat request about its template."""
        request = _request(params, 0)
        request.model = adapter or None
        chat = ChatRequest(messages=messages, truncate_prompt_tokens=params.truncate_prompt_tokens, **fields)
        check(chat)
        made = chat_prompt(chat, self._model)
        request.prompt = [*made.ids]
        check(request)
        return self._job(request_id, request, params, made, made.text)

    def _job(
        self,
        request_id: str,
        request: CompletionRequest,
        params: SamplingParams,
        prompt: PromptText,
        text: str | None,
    ) -> Job:
        room = self._model.served.max_model_len - len(prompt.ids)
        # Offline, the end of the context ends a generation; the endpoint refuses what cannot fit.
        request.max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        request.min_tokens = min(request.min_tokens or 0, request.max_tokens)
        wanted = sampling_params(request, self._model, self._max_logprobs)
        turn_format = TurnFormat(request, HttpConfig())
        grammar = turn_format.rules(prompt.text, self._model.tokenizer).grammar
        if grammar is not None:
            checked = checked_grammar(grammar)
            if checked.problem:
                refuse(f"{turn_format.grammar_param}: {checked.problem}", turn_format.grammar_param)
            wanted = msgspec.structs.replace(wanted, grammar=checked.text)
        understood = Understood(request, self._model, wanted, [prompt], turn_format)
        samples = make_samples(understood, RequestTerms(id=request_id), self._chance, may_be_cut=True)
        return Job(request_id, params, text, samples)


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of prompts.

    A list of numbers is one prompt of token ids.
    """
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(
            f"prompts must be a text, a dictionary, token ids or a list of those, not {prompts!r}"
        )
    return list(prompts)


def as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or several, as a list of conversations."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(
            "messages must be a list of dictionaries with role and content, or a list of such lists"
        )
    several = bool(messages) and not isinstance(messages[0], Mapping)
    conversations = list(messages) if several else [messages]
    for conversation in conversations:
        if not isinstance(conversation, Sequence) or not all(
            isinstance(item, Mapping) for item in conversation
        ):
            raise TypeError("a conversation must be a list of dictionaries with role and content")
    return [[dict(message) for message in conversation] for conversation in conversations]


def one_per_prompt(value: Any, count: int, name: str) -> list[Any]:
    """One value per prompt, from one for all or a list.

    Raises:
        ValueError: neither.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"there are {count} prompts, but {name} has {len(value)} entries")
    return list(value)


def in_users_terms(error: ApiError | MeshError, index: int, count: int) -> ValueError:
    """Refusal of the mesh as a ``ValueError``, with the prompt's index."""
    where = f"prompts[{index}]: " if count > 1 else ""
    return ValueError(f"{where}{error}")


def _request(params: SamplingParams, priority: int) -> CompletionRequest:
    request = request_of(params)
    request.priority = priority
    return request


def _parts(prompt: Any) -> tuple[str | None, Sequence[int] | None, str | None]:
    """The text, the token ids and the cache salt of a prompt."""
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, Mapping):
        return None, _ids(prompt), None
    unknown = sorted(set(prompt) - PROMPT_KEYS)
    if unknown:
        raise ValueError(f"a prompt with {unknown[0]!r} is not supported; known are {sorted(PROMPT_KEYS)}")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if not isinstance(text, str) and ids is None:
        raise TypeError("a prompt dictionary needs a text under 'prompt', or a list under 'prompt_token_ids'")
    return text, None if ids is None else _ids(ids), prompt.get("cache_salt")


def _ids(prompt: Any) -> Sequence[int]:
    if not isinstance(prompt, Sequence) or not all(_is_id(item) for item in prompt):
        raise TypeError(
            f"a prompt must be a text, token ids (whole numbers) or a dictionary, not {prompt!r:.60}"
        )
    return prompt


def _is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and _is_id(value[0])


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
