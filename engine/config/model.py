"""Settings of the model: which one, and how its weights are read."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from coordinator.settings.flags import Size, flag
from engine.config.quantization import ONLINE, OnlineName, QuantizationName

DType = Literal["auto", "float32", "bfloat16", "float16", "half", "float"]

SHIPPED_MODEL = "lockstep-moe"
SHIPPED_HEAD = f"{SHIPPED_MODEL}-eagle3"
"""Name of the EAGLE-3 head that ships beside the model."""
QUANTIZED_MODELS: dict[str, Literal["int8", "int4"]] = {
    f"{SHIPPED_MODEL}-int8": "int8",
    f"{SHIPPED_MODEL}-int4": "int4",
}
"""Names of the shipped model in fewer bits, made at first use."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how it is read. The same on all instances of a mesh."""

    model: Annotated[
        str | None,
        flag(
            positional=True,
            help=f"Local directory, GGUF file or Hugging Face repository id; unset: {SHIPPED_MODEL}, which "
            "ships with Lockstep, or on an instance that joins, the model of the mesh.",
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        flag(help="Names that clients use; the first is reported. Unset: the model as given."),
    ] = ()
    revision: Annotated[str | None, flag(help="Branch, tag or commit of the repository.")] = None
    dtype: Annotated[DType, flag(help="Data type of weights and activations.")] = "auto"
    max_model_len: Annotated[
        Size | None,
        flag(
            words={"auto": -1},
            help="Context length in tokens (8k, 1K and the like work); unset, -1 or auto: the model's own, "
            "as much of it as fits the KV cache.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, flag(help="Run the checkpoint's model code where transformers has none for its family.")
    ] = False
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        flag(help="How weights are read; dummy makes random ones, for measurements."),
    ] = "auto"

    quantization: Annotated[
        QuantizationName | None,
        flag(
            "-q",
            help="Quantise plain weights while they are read: int8 (activations in 8 bits, too), "
            "int8_per_channel_weight_only, int4, fp8_per_channel or fp8_per_block. Other names say what a "
            "checkpoint must be quantised by; unset: as it is.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if not all(name.strip() for name in self.served_model_name):
            raise ValueError(
                "--served-model-name is empty: give a name, or leave it out for the model as given"
            )

    @property
    def reads_weights(self) -> bool:
        """Whether weights come from the checkpoint, rather than from a random generator."""
        return self.load_format != "dummy"

    @property
    def online(self) -> OnlineName | None:
        """Quantisation of plain weights while they are read; None: they stay as they are."""
        return next((name for name in ONLINE if name == self.quantization), None)
