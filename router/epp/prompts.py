"""Reads requests as far as the choice of an instance depends on them.

Prompts are made by the same functions as in a router, so the blocks of their prefixes have the same names. A
request that a router would refuse is read as none: the router answers it.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from engine.sampling import SamplingParams
from router.api.bodies import READERS
from router.api.headers import pinned_rank, session
from router.api.understanding import Understanding
from router.config import HttpConfig
from router.errors import ApiError
from router.http.request_path import without_prefix
from router.mesh import Prompt
from router.text.text_models import TextModels


class PromptReader:
    """Reads bodies of the endpoints that generate."""

    def __init__(self, models: TextModels, config: HttpConfig) -> None:
        self._models = models
        self._understanding = Understanding(models, config)
        self._root_path = config.root_path

    def __repr__(self) -> str:
        return f"<PromptReader with {self._understanding!r}>"

    async def read(self, headers: Mapping[str, str], body: bytes) -> Prompt | None:
        """The request for a choice; None where the router that gets it chooses by itself.

        That is where it is none that generates, names its instance, or has several samples.
        """
        path = without_prefix(headers.get(":path", "").partition("?")[0], self._root_path)
        read = READERS.get(path)
        if read is None or not body:
            return None
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        request = Request({"type": "http", "headers": encoded})
        try:
            wanted, prompts = await self._understanding.prompts(lambda served: read(body, served), len(body))
            adapter = self._models.served().adapter_of(wanted.model or "")
            if len(prompts) != 1 or (wanted.n or 1) != 1 or pinned_rank(request, wanted) is not None:
                return None
            key = session(request, wanted)
        except (ApiError, LookupError):
            return None
        return Prompt(
            request_id=headers.get("x-request-id", ""),
            prompt_ids=prompts[0].ids,
            params=SamplingParams(prompt_logprobs=wanted.prompt_logprobs),
            seed=0,
            asked=max(0, wanted.max_tokens or 0),
            cache_salt=wanted.cache_salt or "",
            adapter=adapter,
            session=key,
        )
