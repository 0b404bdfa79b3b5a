"""Answers of pooled requests kept by their content, in the memory of a router (pure).

The bits of an answer are the same alone and in any batch, on any instance of a numerics class. So an answer
may be given again for the same input. Its name is made of all that decides it: the class, which
stands for weights, data type, kernels and quantisation; the model's own facts; the tokens; and what is asked.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence

import msgspec

from coordinator.numerics import Numerics
from engine.pooling_params import Pooled, PoolingParams
from router.mesh import ServedModel
from router.metrics.pooling_counts import PoolingCounts

OVERHEAD = 400
"""Bytes that an answer takes beside its numbers: its name, and objects around both."""


class PoolingCache:
    """The answers used last, of one numerics class, within so many bytes."""

    def __init__(self, most_bytes: int, counts: PoolingCounts) -> None:
        """``most_bytes``: room for answers; 0 keeps none."""
        self._most = most_bytes
        self._counts = counts
        counts.num_bytes = 0 if most_bytes else None
        self._class = ""
        """Name of the class whose answers are here."""
        self._answers: OrderedDict[bytes, Pooled] = OrderedDict()
        self._num_bytes = 0

    def __repr__(self) -> str:
        return f"<PoolingCache {len(self._answers)} of {self._class or 'no class'}, {self._num_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def is_on(self) -> bool:
        """Whether answers are kept."""
        return self._most > 0

    def use(self, classes: Collection[Numerics]) -> bool:
        """Whether answers may be taken from here, in a mesh of these classes.

        Answers of other classes are let go. Instances of several classes, or of one in which a batch decides
        bits, or with random weights, have no one answer to an input.
        """
        if not classes:
            return False  # no instance is ready: the next one may be of this class
        found = next(iter(classes)) if len(classes) == 1 else None
        name = found.fingerprint if found is not None and found.invariant and found.weights else ""
        if name != self._class:
            self._counts.events["cleared"] += len(self._answers)
            self._answers.clear()
            self._class = name
            self._holds(0)
        return bool(name)

    def get(self, name: bytes) -> Pooled | None:
        """The answer of this name, which is now the newest."""
        found = self._answers.get(name)
        self._counts.events["miss" if found is None else "hit"] += 1
        if found is not None:
            self._answers.move_to_end(name)
        return found

    def put(self, name: bytes, answer: Pooled, computed_in: Numerics | None) -> None:
        """Keep an answer, unless another class computed it."""
        size = len(answer.values) + OVERHEAD
        is_ours = computed_in is not None and computed_in.fingerprint == self._class
        if not is_ours or size > self._most or name in self._answers:
            return
        self._answers[name] = answer
        num_bytes = self._num_bytes + size
        while num_bytes > self._most:
            _, oldest = self._answers.popitem(last=False)
            num_bytes -= len(oldest.values) + OVERHEAD
            self._counts.events["evicted"] += 1
        self._holds(num_bytes)

    def _holds(self, num_bytes: int) -> None:
        self._num_bytes = self._counts.num_bytes = num_bytes


class AnswerNames:
    """Names of the answers of one request; its class is the cache's."""

    def __init__(self, model: ServedModel, params: PoolingParams) -> None:
        """``params`` but for the type ids, which each input has its own of."""
        facts = msgspec.json.encode(model.pooling, order="sorted")
        asked = msgspec.json.encode(msgspec.structs.replace(params, token_type_ids=b""), order="sorted")
        self._shared = hashlib.blake2b(digest_size=32)
        for part in (model.fingerprint.encode(), facts, asked):
            self._shared.update(len(part).to_bytes(8, "little") + part)

    def name(self, ids: Sequence[int], type_ids: bytes) -> bytes:
        """Name of the answer to an input."""
        digest = self._shared.copy()
        digest.update(len(ids).to_bytes(8, "little") + array("q", ids).tobytes() + type_ids)
        return digest.digest()
