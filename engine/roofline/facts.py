"""Messages between ``lockstep bench machine --model`` and the process that measures (no torch)."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config.quantization import QuantizationName

RooflineDtype = Literal["bfloat16", "float32"]


class RooflineRequest(msgspec.Struct, frozen=True):
    """Decode steps that are to be timed."""

    model: str
    """Directory of the checkpoint."""
    threads: int
    dtype: RooflineDtype = "bfloat16"
    quantization: QuantizationName | None = None
    batches: tuple[int, ...] = (1, 8, 32)
    """Sequences of each step."""
    times: int = 30
    """Steps of each number of sequences."""


class StepFacts(msgspec.Struct, frozen=True):
    """A decode step: its time and its least work."""

    batch: int
    seconds: float
    """Median of the steps."""
    read_bytes: float
    """Weights as they are laid out, and cached keys and values, each once."""
    operations: float
    """Operations of products with weights and of attention; a multiply-add counts as two."""


class RooflineFacts(msgspec.Struct, frozen=True):
    """Steps of a model."""

    kind: str
    """Kind of kernels that computed them."""
    weight_bytes: int
    """Weights as they are laid out."""
    steps: list[StepFacts]
