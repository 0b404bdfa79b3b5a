"""Names that ``--quantization`` accepts (pure)."""

from __future__ import annotations

from typing import Literal, get_args

OnlineName = Literal["int8_per_channel_weight_only", "int8", "int4", "fp8_per_channel", "fp8_per_block"]
ONLINE: tuple[OnlineName, ...] = get_args(OnlineName)
"""Names of quantisations that are applied to a plain checkpoint while it is read."""
QuantizationName = Literal[
    "int8_per_channel_weight_only",
    "int8",
    "int4",
    "fp8_per_channel",
    "fp8_per_block",
    "compressed-tensors",
    "fp8",
    "gptq",
    "awq",
    "mxfp4",
]
"""A name of :data:`ONLINE`, or the format that a checkpoint must be quantised in."""
