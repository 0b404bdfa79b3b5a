"""One model in this process, which computes recorded requests again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from coordinator.numerics import TORCH, Facts, Numerics, class_of
from engine.config import EngineConfig
from engine.core import EngineCore, ModelPlace
from engine.executor.uni import UniExecutor
from engine.host.cache_size import size_cache
from engine.messages import Delta, Submit
from engine.numerics import check_kind, facts_of
from engine.pieces.kinds import BoundarySlots
from engine.settings import adopt, resolve
from engine.verification.recorded_drafts import RecordedDrafts

PEER = b"verify"
GRAMMAR_PAUSE = 0.002
"""Seconds between two looks at grammars that are being compiled."""


class Recorded(msgspec.Struct, frozen=True):
    """A request with the tokens that are expected."""

    submit: Submit
    answer: Sequence[int]


Take = Callable[[int, Delta], bool]
"""Consumer of a request's next tokens, by index; returns whether they suffice."""


class Scorer:
    """A loaded model that draws recorded answers again, and scores them."""

    def __init__(self, config: EngineConfig, threads: int) -> None:
        """Reads the checkpoint.

        Raises:
            CheckpointError: it is not there, or cannot be computed as asked.
            TooLittleMemory: no KV cache fits.
        """
        check_kind(config.device)
        info, settings = resolve(config, 1)
        config = adopt(config, settings)
        self._executor = UniExecutor(config, info, threads)
        facts = self._executor.load(lambda _phase: None)
        size = size_cache(config, facts, self._executor.free_kv_memory, 1)
        self._executor.allocate(size.num_blocks, size.num_boundaries)
        self.facts: Facts = facts_of(settings, config.model, info.directory, self._executor.arithmetic())
        """All that decides the bits computed here."""
        self.numerics: Numerics = class_of(self.facts)
        self.fingerprint = settings.fingerprint
        self.directory = info.directory
        self.vocab_size = settings.vocab_size
        self.max_model_len = size.max_model_len
        self._drafts = RecordedDrafts(settings.vocab_size)
        boundaries = [BoundarySlots(kind, size.num_boundaries) for kind in facts.boundaries]
        is_native = all(each.kernels != TORCH for each in self._executor.arithmetic())
        self._core = EngineCore(
            config,
            info,
            self._executor,
            num_blocks=size.num_blocks,
            max_model_len=size.max_model_len,
            place=ModelPlace(has_gpu=facts.device != "cpu", is_native=is_native, boundaries=boundaries),
            speculation=self._drafts,
        )
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"<Scorer of {self.directory} in {self.numerics}>"

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.close()

    def compute(self, wanted: Sequence[Recorded], take: Take) -> dict[int, str]:
        """Compute requests, in batches; returns the reasons of refused ones, by index."""
        index_of: dict[int, int] = {}
        refused: dict[int, str] = {}
        for index, each in enumerate(wanted):
            number = next(self._numbers)
            index_of[number] = index
            self._drafts.expect(len(each.submit.prompt_ids), each.answer)
            submit = msgspec.structs.replace(each.submit, request=number, owed=True)
            if (refusal := self._core.submit(PEER, submit)) is not None:
                refused[index] = refusal.reason
        while not self._core.is_empty:
            for _, refusal in self._core.take_ready():
                refused[index_of[refusal.request]] = refusal.reason
            if not self._core.has_work:
                time.sleep(GRAMMAR_PAUSE)
                continue
            for delta in self._core.step().get(PEER, ()):
                if take(index_of[delta.request], delta) and delta.finish_reason is None:
                    self._core.abort(PEER, [delta.request])
        return refused
