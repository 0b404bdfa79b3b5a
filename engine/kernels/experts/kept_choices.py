"""Experts that the routers of a step chose, kept for the requests that want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kernels.experts.packed_mixture import PackedMoe
from engine.messages import NO_EXPERT


class KeptChoices:
    """Choices of all mixtures in one step, which the kernels write beside their own."""

    def __init__(self, feed_forwards: Sequence[Any], tokens: int) -> None:
        """``feed_forwards``: of all layers, in order; None in a layer without one."""
        self._mixtures = [each if isinstance(each, PackedMoe) else None for each in feed_forwards]
        top_k = max((each.moe.top_k for each in self._mixtures if each is not None), default=0)
        self._kept = np.full((len(self._mixtures), tokens, top_k), NO_EXPERT, dtype=np.uint16)

    def __repr__(self) -> str:
        return f"<KeptChoices {self._kept.shape}>"

    def __enter__(self) -> KeptChoices:
        for mixture, kept in zip(self._mixtures, self._kept, strict=True):
            if mixture is not None:
                mixture.routing["copies"] = kept.ctypes.data
        return self

    def __exit__(self, *_: object) -> None:
        for mixture in self._mixtures:
            if mixture is not None:
                mixture.routing["copies"] = 0

    @property
    def by_token(self) -> npt.NDArray[np.uint16]:
        """[tokens, layers, experts of a token]; NO_EXPERT in layers that are no mixture."""
        return np.ascontiguousarray(self._kept.transpose(1, 0, 2))
