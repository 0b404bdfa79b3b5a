"""Search for the settings that give a numerics class (pure).

A class is known by its digest only. But most of its facts are those of any instance of the model here, and
the others have few values. So each of these is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import msgspec

from coordinator.numerics import Facts, class_of
from engine.config.quantization import ONLINE, OnlineName

PLAIN = "plain"
"""Format of weights that may be quantised while they are read."""
KvCodes = Literal["auto", "int8", "fp8"]
KV_CODES: tuple[KvCodes, ...] = ("auto", "int8", "fp8")


class ClassSettings(msgspec.Struct, frozen=True):
    """Settings in which instances of one model, kind of kernels and data type may differ."""

    kv_cache_dtype: KvCodes = "auto"
    quantization: OnlineName | None = None
    batch_invariant: bool = False

    @property
    def is_quantised(self) -> bool:
        return self.kv_cache_dtype != "auto" or self.quantization is not None

    def __str__(self) -> str:
        words = [f"--kv-cache-dtype {self.kv_cache_dtype}"] * (self.kv_cache_dtype != "auto")
        words += [f"--quantization {self.quantization}"] * (self.quantization is not None)
        words += ["--batch-invariant"] * self.batch_invariant
        return " ".join(words) or "plain weights and KV cache"


def settings_of(facts: Facts, fingerprint: str, weight_format: str) -> ClassSettings | None:
    """Settings whose numerics class has this name; None if there are none.

    ``facts``: of any instance of the model here.
    ``weight_format``: that of the checkpoint (:func:`engine.model.checkpoint.weight_format`).
    """
    for settings in variations(weight_format):
        for is_order_fixed in (True, False):
            workers = tuple(
                msgspec.structs.replace(
                    each, any_ranks=is_order_fixed, batch_invariant=settings.batch_invariant
                )
                for each in facts.workers
            )
            other = msgspec.structs.replace(
                facts,
                workers=workers,
                weights=settings.quantization or weight_format,
                kv_cache_dtype=settings.kv_cache_dtype,
            )
            if class_of(other).fingerprint == fingerprint:
                return settings
    return None


def variations(weight_format: str) -> Iterator[ClassSettings]:
    """All settings for a checkpoint whose weights have this format, the usual ones first."""
    weights: tuple[OnlineName | None, ...] = (None, *ONLINE) if weight_format == PLAIN else (None,)
    for fixed, online, kept in itertools.product((False, True), weights, KV_CODES):
        yield ClassSettings(kept, online, fixed)
