"""What the HTTP layer needs of the mesh behind it, as an interface.

:class:`router.dispatch.client.MeshClient` is the real one; tests use a scripted one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from engine.messages import Delta
from engine.sampling import SamplingParams

Take = Callable[[Delta], bool]
"""Whether it dealt with a delta."""
TakeSingle = Callable[[int, float], bool]
"""The same for a delta that is a single token, given the token and the time (of ``time.perf_counter``)."""


class MeshError(Exception):
    """A request that the mesh cannot take, in the client's terms.

    ``kind`` is the ``type`` of the error body (``ServiceUnavailableError`` ...).
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.retry_after = retry_after


class ServedModel(msgspec.Struct, frozen=True):
    """The model of the mesh, as clients see it."""

    names: tuple[str, ...]
    """Names that requests may use; the first is reported."""
    directory: str
    """Its own, also with --tokenizer; the tokenizer's where the model is not on this host."""
    vocab_size: int
    max_model_len: int


class Prompt(msgspec.Struct, frozen=True):
    """One sample to generate."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    asked: int = 0
    """Tokens that the client itself asked for: who cannot hold as many would end it early."""
    sample_index: int = 0
    rank: int | None = None
    """The instance that the client asked for (X-data-parallel-rank)."""
    priority: int = 0
    cache_salt: str = ""
    session: str = ""
    """Requests of one session bear the same: a hint to keep them together."""
    traceparent: str = ""
    """W3C Trace Context that the instance is told; empty for none."""


class Generation(Protocol):
    """One sample in flight. Iterating ends after the delta that has a finish_reason."""

    @property
    def rank(self) -> int | None:
        """The instance that it runs on now, None while it has none (for metrics)."""
        ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def hand_over(self, take: Take, take_single: TakeSingle | None = None) -> None:
        """Offer each delta that comes while the reader waits for it to ``take`` first, which may deal with it
        at once in the reader's place: then the reader sleeps on. What ``take`` refuses (False) is the
        reader's, as is an exception that it raises. Deltas that are single tokens may go to ``take_single``
        instead, which costs less."""
        ...

    def close(self) -> None:
        """Forget the request; aborts it where it runs. Harmless after the end, and twice."""
        ...


class Mesh(Protocol):
    """The instances, seen as one."""

    @property
    def model(self) -> ServedModel | None:
        """None until the first instance has registered."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether at least one instance is ready and makes progress."""
        ...

    def check_room(self) -> None:
        """Called before a prompt is made of a request, which may take long.

        Raises:
            MeshError: nobody could take any request now (503).
        """
        ...

    def generate(self, prompt: Prompt) -> Generation:
        """Send a request to an instance.

        Raises:
            MeshError: no instance can take it (503), or the one asked for does not exist (400).
        """
        ...
