"""Journal of a running answer: its tokens in the order in which they became events.

A router that takes an answer over gives the recorded tokens to the same code in the same order, so that the
same events come out of it, and then generates on behind them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from coordinator.numerics import Numerics
from engine.messages import Delta
from router.mesh import (
    Generation,
    Known,
    Mesh,
    MeshError,
    NumericsSwitch,
    Prompt,
    ServedModel,
    TokenSink,
    WeightSpan,
)
from router.stored.database import StoreUnusable
from router.stored.store import AnswerTaken


class JournalBatch(msgspec.Struct, frozen=True, array_like=True):
    """Deltas of one sample, committed together; each has one token."""

    sample: int
    deltas: list[Delta]
    numerics: str | None = None
    """Name of the numerics class that gave the sample's first token."""
    spans: list[WeightSpan] = []
    """Weight versions of the sample's tokens, the batch included; empty: as before."""
    first_class: Numerics | None = None
    """The class of that name, with the sample's first batch."""


logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
"""Pause before an answer is tried again."""

Continues = Callable[[], Awaitable[bool]]
Lost = Callable[[], Awaitable[None]]
IsPassing = Callable[[MeshError, bool], bool]
"""Whether to try again after an error; whether the last try gave any token."""

_decode = msgspec.msgpack.Decoder(JournalBatch).decode


class TokenStore(Protocol):
    """Part of :class:`router.stored.store.AnswerStore` that a journal needs."""

    async def append(self, id: str, number: int, batch: bytes) -> None: ...
    async def tokens(self, id: str, first: int) -> list[bytes]: ...


class Journal:
    """Journal of one answer, first read, then written."""

    def __init__(
        self,
        id: str,
        store: TokenStore,
        recorded: Sequence[bytes],
        continues: Continues | None,
        lost: Lost | None = None,
    ) -> None:
        """``recorded``: batches that are in the store already.

        ``continues`` waits until there may be more of them, which another router writes; False once this one
        is to write, and None where it always was. ``lost`` ends the run whose answer another router has.
        """
        self._id = id
        self._store = store
        self._batches = [_decode(each) for each in recorded]
        self._continues = continues
        self._lost = lost
        self._read = 0
        """Batches whose deltas have been taken."""
        self._turn = asyncio.Condition()
        self._fetching = asyncio.Lock()
        self._is_writing = False
        self._is_lost = False
        """The store has failed: what follows is handed out all the same."""

    def __repr__(self) -> str:
        return f"<Journal of {self._id}: {self._read} of {len(self._batches)} batches read>"

    async def recorded(self, sample: int) -> AsyncIterator[JournalBatch]:
        """Batches of a sample, each once those of other samples before it have been taken.

        Call :meth:`took` after each. Ends where this router is to write.
        """
        while True:
            async with self._turn:
                while self._read < len(self._batches) and self._batches[self._read].sample != sample:
                    await self._turn.wait()
            if self._read == len(self._batches):
                if not await self._fetch():
                    return
                continue
            yield self._batches[self._read]

    async def took(self) -> None:
        """Give the turn on: the deltas of the batch that came last have been taken."""
        async with self._turn:
            self._read += 1
            self._turn.notify_all()

    async def _fetch(self) -> bool:
        """Whether the store may have given more batches, which another router wrote."""
        async with self._fetching:
            if self._read < len(self._batches):
                return True
            if self._is_writing or self._continues is None:
                return False
            self._is_writing = not await self._continues()
            found = await self._store.tokens(self._id, len(self._batches))  # also what came before it died
            if self._is_writing and not found:
                return False
        async with self._turn:
            self._batches += map(_decode, found)
            self._turn.notify_all()
        return True

    async def write(self, batch: JournalBatch) -> None:
        """Append a batch; returns once it is committed, or the store has failed.

        Raises:
            AnswerTaken: another router has the answer, and there is no ``lost``.
        """
        number = len(self._batches)
        self._batches.append(batch)
        self._read = len(self._batches)
        if self._is_lost:
            return
        try:
            await self._store.append(self._id, number, msgspec.msgpack.encode(batch))
        except StoreUnusable as error:
            self._is_lost = True
            logger.error("answer %s goes on, but can no longer be resumed: %s", self._id, error)
        except AnswerTaken:
            if self._lost is None:
                raise
            await self._lost()


class JournalMesh:
    """The mesh with the journal of one answer between, for its samples."""

    def __init__(self, mesh: Mesh, journal: Journal, is_passing: IsPassing | None = None) -> None:
        """``is_passing``: None: all errors end the answer."""
        self._mesh = mesh
        self._journal = journal
        self._is_passing = is_passing
        self._samples = 0

    @property
    def model(self) -> ServedModel | None:
        """See :class:`router.mesh.Mesh`."""
        return self._mesh.model

    def generate(self, prompt: Prompt) -> Generation:
        """See :class:`router.mesh.Mesh`; samples are asked for in their order."""
        self._samples += 1
        return JournalGeneration(self._mesh, self._journal, self._samples - 1, prompt, self._is_passing)


class JournalGeneration:
    """A :class:`router.mesh.Generation` whose tokens are committed before they are handed out."""

    def __init__(
        self, mesh: Mesh, journal: Journal, sample: int, prompt: Prompt, is_passing: IsPassing | None = None
    ) -> None:
        self._mesh = mesh
        self._journal = journal
        self._is_passing = is_passing
        self._sample = sample
        self._prompt = prompt
        self._numerics: str | None = None
        self._first_class: Numerics | None = None
        self._spans: list[WeightSpan] = []
        self._generation: Generation | None = None
        self._is_closed = False

    @property
    def rank(self) -> int | None:
        """See :class:`router.mesh.Generation`."""
        return None if self._generation is None else self._generation.rank

    @property
    def fingerprint(self) -> str | None:
        """See :class:`router.mesh.Generation`."""
        return self._numerics

    @property
    def first_class(self) -> Numerics | None:
        """See :class:`router.mesh.Generation`."""
        return self._first_class

    @property
    def numerics_changes(self) -> Sequence[NumericsSwitch]:
        """See :class:`router.mesh.Generation`."""
        return () if self._generation is None else self._generation.numerics_changes

    @property
    def weight_spans(self) -> Sequence[WeightSpan]:
        """See :class:`router.mesh.Generation`."""
        return self._spans

    def hand_over(self, sink: TokenSink) -> None:
        """Keep the deltas: each waits for its commit, which a sink cannot."""

    def close(self) -> None:
        """See :class:`router.mesh.Generation`."""
        self._is_closed = True
        if self._generation is not None:
            self._generation.close()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        known: list[int] = []
        async for batch in self._journal.recorded(self._sample):
            self._numerics = batch.numerics
            self._first_class = self._first_class or batch.first_class
            self._spans[:] = batch.spans or self._spans
            for delta in batch.deltas:
                known += delta.token_ids
                yield delta
            await self._journal.took()
            if batch.deltas[-1].finish_reason is not None:
                return
        while not self._is_closed:  # as by a stop string among what was recorded
            before = len(known)
            try:
                async for part in self._generated(known):
                    yield part
                return
            except MeshError as error:
                # it may have begun at another router: its reader cannot be told to ask again
                if self._is_passing is None or not self._is_passing(error, len(known) > before):
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _generated(self, known: list[int]) -> AsyncIterator[Delta]:
        """What follows the ``known`` tokens, each committed and added to them."""
        begun = Known(list(known), self._numerics, list(self._spans)) if known else None
        wanted = msgspec.structs.replace(self._prompt, known=begun)
        self._generation = self._mesh.generate(wanted)
        async for delta in self._generation:
            first = None
            if not known:
                self._numerics = self._generation.fingerprint
                first = self._first_class = self._generation.first_class
            known += delta.token_ids
            spans = list(self._generation.weight_spans)
            new = [] if spans == self._spans else spans
            self._spans[:] = spans
            parts = by_token(delta)
            await self._journal.write(JournalBatch(self._sample, parts, self._numerics, new, first))
            for part in parts:
                yield part


def by_token(delta: Delta) -> list[Delta]:
    """A delta as deltas of one token each."""
    last = len(delta.token_ids) - 1
    if last <= 0:
        return [delta]
    first = msgspec.structs.replace(
        delta, token_ids=delta.token_ids[:1], finish_reason=None, stop_reason=None, logprobs=None
    )
    if delta.logprobs is not None:
        first = msgspec.structs.replace(first, logprobs=delta.logprobs[:1])
    parts = [first]
    for position in range(1, last + 1):
        logprobs = None if delta.logprobs is None else [delta.logprobs[position]]
        parts.append(Delta(delta.request, [delta.token_ids[position]], logprobs=logprobs))
    parts[-1] = msgspec.structs.replace(
        parts[-1], finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
    )
    return parts
