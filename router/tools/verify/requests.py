"""Requests as clients sent them, beside what their capsules hold: prompts, parameters, number of samples.

A capsule holds the prompt as token ids. A server with another chat template, or one that asked its instances
for other parameters, has capsules that are right by themselves. What was sent shows the difference.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest

import msgspec
from msgspec.structs import astuple

from engine.prompt_images import PromptImage
from engine.sampling import SamplingParams
from router.api.bodies import READERS
from router.api.capsules import asked_params
from router.api.headers import RequestTerms
from router.api.request_samples import make_samples
from router.api.understanding import Understanding, Understood, Wanted
from router.capsule import DIGEST_PREFIX, Capsule, CapsuleError, CapsulePrompt, images_of
from router.config import HttpConfig
from router.errors import ApiError
from router.mesh import ServedModel
from router.text.output_stream import OutputStream
from router.text.text_model import TextModel

PATHS = {
    "cmpl-": "/v1/completions",
    "chatcmpl-": "/v1/chat/completions",
    "resp_": "/v1/responses",
    "msg_": "/v1/messages",
}
"""Endpoint by the beginning of an answer's id."""


class GivenModel:
    """The text side of the model at hand, under any name."""

    def __init__(self, model: TextModel) -> None:
        self._model = model

    async def get(self, name: str | None) -> TextModel:
        return self._model


class SentRequests:
    """Bodies of requests, each found again by its digest."""

    def __init__(self, bodies: Sequence[bytes], model: TextModel, config: HttpConfig) -> None:
        """``config``: flags of the server that decide prompts and parameters."""
        self._bodies = {DIGEST_PREFIX + hashlib.sha256(body).hexdigest(): body for body in bodies}
        self._model = model
        self._understanding = Understanding(GivenModel(model), config)

    def __repr__(self) -> str:
        return f"<SentRequests {len(self._bodies)}>"

    def problems(self, capsules: Sequence[Capsule]) -> list[str | None]:
        """Why each capsule answers none of the requests, or another one; None if it does."""

        async def all_problems() -> list[str | None]:
            return [await self._problem(each) for each in capsules]

        return asyncio.run(all_problems())

    async def _problem(self, capsule: Capsule) -> str | None:
        body = self._bodies.get(capsule.request)
        if body is None:
            return "the capsule answers none of the given requests: none has its digest"
        path = next((path for begin, path in PATHS.items() if capsule.id.startswith(begin)), None)
        if path is None:
            return "the capsule's id names no endpoint, so its request cannot be read"
        try:
            understood = await self._understanding.understand(
                _reader(path, body), len(body), budget_is_advice=path == "/v1/messages"
            )
            samples = make_samples(understood, RequestTerms(id=capsule.id))
        except ApiError as error:
            return f"no server of this checkpoint with these flags answers the request: {error}"
        expected = [each for each in samples if each.is_first_of_prompt]
        if len(expected) != len(capsule.prompts):
            return f"the request has {len(expected)} prompts, the capsule {len(capsule.prompts)}"
        found = (
            self._difference(prompt, sample, understood)
            for prompt, sample in zip(capsule.prompts, expected, strict=True)
        )
        images = (
            _other_images(capsule, number, sample.prompt.images) for number, sample in enumerate(expected)
        )
        return next((each for each in (*found, *images) if each), None)

    def _difference(self, prompt: CapsulePrompt, sample: OutputStream, understood: Understood) -> str | None:
        ids, wanted = prompt.prompt_ids, sample.prompt.prompt_ids
        for index, (one, other) in enumerate(zip_longest(ids, wanted)):
            if one != other:
                return (
                    f"its prompt differs from the request's at token {index} of {len(wanted)}: "
                    f"{self._text(one)} in the capsule, {self._text(other)} by the request: another chat "
                    "template, tokenizer or text"
                )
        params, count = understood.params, len(prompt.samples)
        if count != params.n:
            return f"the request asks for {params.n} samples, and the capsule has {count}"
        if params.seed is not None and prompt.seed != str(params.seed):
            return f"the request's seed is {params.seed}, and the capsule's {prompt.seed}"
        names = other_params(prompt.params, asked_params(sample.prompt, params))
        if params.max_tokens is None:  # the server's context decides
            names = [each for each in names if not each.startswith("max_tokens ")]
        return f"its parameters are not the request's: {', '.join(names)}" if names else None

    def _text(self, token_id: int | None) -> str:
        return "its end" if token_id is None else f"{token_id} {self._model.tokenizer.decode([token_id])!r}"


def _other_images(capsule: Capsule, number: int, asked: Sequence[PromptImage]) -> str | None:
    """Why a capsule's images of a prompt are not the request's; None if they are."""
    try:
        found = images_of(capsule, number)
    except CapsuleError as error:
        return str(error)
    wanted = [(each.first, each.end, *map(astuple, each.tensors)) for each in asked]
    here = [(each.first, each.end, *map(astuple, each.tensors)) for each in found]
    return None if here == wanted else "its images are not the request's"


def other_params(params: SamplingParams, asked: SamplingParams) -> list[str]:
    """Parameters that were not asked for so, with their values."""
    wanted = msgspec.json.decode(msgspec.json.encode(asked), type=SamplingParams)
    pairs = (
        (name, getattr(params, name), getattr(wanted, name)) for name in SamplingParams.__struct_fields__
    )
    return [f"{name} {_shown(one)} instead of {_shown(other)}" for name, one, other in pairs if one != other]


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:60]}..."


def _reader(path: str, body: bytes) -> Callable[[ServedModel], Wanted]:
    """Reader of a body, under whatever name it calls the model."""

    def read(served: ServedModel) -> Wanted:
        wanted = READERS[path](body, served)
        wanted.model = None
        return wanted

    return read
