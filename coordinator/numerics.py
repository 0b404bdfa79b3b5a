"""Numerics class of an instance: a digest of all that decides its bits (pure).

Instances of one class give equal token ids and log-probabilities for equal weights, request and seed, if the
class is *invariant*: the native step computes each row by itself. Where torch's operators compute, the bits
of a row depend on the rows beside it, and the class is *variant*, unless they compute in blocks of fixed size
(``--batch-invariant``).

The facts are those that were seen to change bits. Pipeline stages, spread experts, the size of a step and
compressed weights were seen not to, so they are none of the facts. The engine collects them
(:mod:`engine.numerics`), and the page docs/design/numerics.md lists them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import msgspec

from parallel.kernel_kinds import KINDS, common_kind

NATIVE_KINDS = tuple(KINDS)
"""Kinds of native kernels."""
TORCH = "torch"
"""Kind of kernels where torch's operators compute the model."""
UNKNOWN = "unknown"
"""Kind of kernels of workers that name none: they are of an older version."""
PREFIX = "fp_"
VARIANT = "_variant"
"""End of the fingerprint of a class that is not invariant."""
DIGEST_LENGTH = 12
"""Hexadecimal digits of a fingerprint: 48 bits."""


class Arithmetic(msgspec.Struct, frozen=True):
    """What a worker computes with."""

    kernels: str
    """One of :data:`NATIVE_KINDS`, or :data:`TORCH`."""
    version: str
    """Sources and compiler of native kernels; device of torch's operators."""
    attention: str
    """Name of the attention backend."""
    layers: tuple[int, int] = (0, 0)
    """Numbers of the layers computed there: [first, stop)."""
    any_ranks: bool = False
    """Whether the bits are those of any other number of tensor-parallel ranks, and of one."""
    batch_invariant: bool = False
    """Whether torch's operators compute in blocks of fixed size."""
    weights: str = ""
    """Digest of all bytes of the checkpoint's weights; empty for random ones."""

    @property
    def is_invariant(self) -> bool:
        """Whether a row's bits do not depend on the rows beside it."""
        return self.kernels in NATIVE_KINDS or self.batch_invariant


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides an instance's bits."""

    model: str
    """Fingerprint of the checkpoint; the digest of all its weights is that of each worker."""
    weights: str
    """Quantisation method of the checkpoint, or of ``--quantization``.

    ``plain`` without one, ``dummy`` for random weights.
    """
    dtype: str
    kv_cache_dtype: str = "auto"
    """What keys and values are kept as; ``auto``: numbers of this data type."""
    tensor_parallel_size: int
    """Counts where sums over ranks depend on it (:attr:`Arithmetic.any_ranks`)."""
    has_whole_experts: bool = False
    """Whether each of several ranks computes whole experts (``-ep``), not a part of each.

    It counts where the number of ranks does.
    """
    angles_for: int = 0
    """Tokens of the longest request, where rotary angles are chosen for it; else 0."""
    workers: tuple[Arithmetic, ...]
    """By stage, then tensor-parallel rank."""
    versions: dict[str, str]
    """Versions of packages: also where kernels are native, torch makes the tables of positions."""


class Numerics(msgspec.Struct, frozen=True):
    """The numerics class of an instance, as all others know it."""

    fingerprint: str
    """Name of the class, and ``system_fingerprint`` in answers."""
    kernels: str
    """Kind of the kernels; several where workers differ, joined by ``+``."""
    dtype: str
    invariant: bool
    weights: str = ""
    """Digest of all bytes of the checkpoint's weights; empty for random ones."""

    def __str__(self) -> str:
        return f"{self.fingerprint} ({self.kernels} kernels, {self.dtype})"


def class_of(facts: Facts) -> Numerics:
    """The class of an instance with these facts.

    Which layers a worker computes matters only where workers compute differently. Ranks of a stage do not.
    """
    if facts.workers and all(worker.any_ranks for worker in facts.workers):
        facts = _of_any_ranks(facts)
    alike = {msgspec.structs.replace(worker, layers=(0, 0)) for worker in facts.workers}
    if len(alike) == 1:
        facts = msgspec.structs.replace(facts, workers=tuple(alike))
    kinds = {worker.kernels for worker in facts.workers} or {UNKNOWN}
    invariant = bool(facts.workers) and all(worker.is_invariant for worker in facts.workers)
    weights = {worker.weights for worker in facts.workers}
    return _numerics(msgspec.json.encode(facts, order="sorted"), kinds, {facts.dtype}, invariant, weights)


def _of_any_ranks(facts: Facts) -> Facts:
    """These facts without what is the same for any number of ranks."""
    workers = tuple(dict.fromkeys(facts.workers))
    return msgspec.structs.replace(facts, tensor_parallel_size=1, has_whole_experts=False, workers=workers)


def combined(classes: Collection[Numerics]) -> Numerics:
    """The class of each member of a group over which experts are spread.

    Members of several classes compute each other's experts, so answers depend on where experts are.
    """
    found = set(classes)
    if len(found) == 1:
        return found.pop()
    names = "\0".join(sorted(each.fingerprint for each in found))
    kinds = {kind for each in found for kind in each.kernels.split("+")}
    dtypes, weights = {each.dtype for each in found}, {each.weights for each in found}
    return _numerics(names.encode(), kinds, dtypes, False, weights)


def is_invariant(fingerprint: str | None) -> bool:
    """Whether the class of this name is known, and promises equal bits."""
    return fingerprint is not None and not fingerprint.endswith(VARIANT)


def slowest_kind(classes: Sequence[Numerics]) -> str | None:
    """The kind of native kernels that all instances of these classes can use.

    None if one of them computes with others, or if they have none in common.
    """
    return common_kind(kind for each in classes for kind in each.kernels.split("+"))


def _numerics(
    content: bytes, kinds: set[str], dtypes: set[str], invariant: bool, weights: set[str]
) -> Numerics:
    digest = hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]
    fingerprint = PREFIX + digest + ("" if invariant else VARIANT)
    return Numerics(
        fingerprint, "+".join(sorted(kinds)), "+".join(sorted(dtypes)), invariant, "+".join(sorted(weights))
    )
