"""Configuration of an EAGLE-3 head, in either of its two formats (no torch).

The library ``speculators`` writes a config.json with ``speculators_model_type``. EAGLE's own one, which
SGLang reads, describes a model of one layer of the architecture ``LlamaForCausalLMEagle3``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.model.checkpoint import CheckpointError, ModelInfo
from engine.model.model_files import read_json
from engine.model.model_sources import language_config
from engine.model.weight_digest import BrokenWeights, StoredTensor, stored_tensors
from engine.model.weight_set import weight_files

KIND = "speculators_model_type"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MODEL_TYPES = ("llama", "qwen3")
"""Families whose layers a head may have."""
OWN_LAYER = ("midlayer.", "layers.0.")
"""Names that the formats have for the head's layer."""
FC, HEAD, EMBEDDING, TO_TARGET = "fc.weight", "lm_head.weight", "embed_tokens.weight", "d2t"


class EagleConfig(msgspec.Struct, frozen=True):
    """Facts of an EAGLE-3 head."""

    directory: str
    layer: dict[str, Any]
    """Configuration of its layer, as of a model of transformers."""
    model_type: str
    hidden: int
    served_hidden: int
    """Width of the model for which it was made."""
    vocab_size: int
    """Tokens of that model."""
    draft_vocab_size: int
    """Tokens that it may propose."""
    inner: tuple[int, ...]
    """Numbers of the served model's layers whose inputs it reads; empty: the usual three."""
    norm_before_residual: bool
    """Whether the layer adds to its normed input, not to the input itself."""
    norm_before_fc: bool
    """Whether one norm is applied to the inner rows together."""
    fc_norm: bool
    """Whether each of the inner rows has a norm of its own."""
    norm_output: bool
    """Whether further tokens read its result behind the last norm."""
    most: int | None
    """Tokens that it was made to propose; None: not known."""

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The served model's layers whose inputs are read, of so many."""
        return self.inner or (min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3))


def read_eagle_config(directory: Path) -> EagleConfig:
    """Read config.json of a head.

    Raises:
        CheckpointError: it is missing, or none of an EAGLE-3 head.
    """
    config = read_json(directory / "config.json", required=True)
    speculators, layer = KIND in config, config
    if speculators:
        layer = config.get("transformer_layer_config") or {}
    names = config.get("architectures") or [""]
    kind = config.get(KIND) if speculators else "eagle3" if "eagle3" in str(names[0]).lower() else names[0]
    if kind != "eagle3" or not isinstance(layer, dict):
        raise CheckpointError(
            f'--speculative-config: method "eagle3" reads EAGLE-3 heads, and {directory}/config.json '
            f"describes {kind!r}: it needs {KIND} eagle3, or an architecture like LlamaForCausalLMEagle3"
        )
    eagle = config.get("eagle_config") or {}
    try:
        return _config_of(directory, {**layer}, {**config, **eagle}, speculators=speculators)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"--speculative-config: {directory}/config.json makes no sense: {type(error).__name__} {error}"
        ) from error


def _config_of(
    directory: Path, layer: dict[str, Any], config: Mapping[str, Any], *, speculators: bool
) -> EagleConfig:
    hidden, vocab_size = int(layer["hidden_size"]), int(layer["vocab_size"])
    model_type = str(layer.get("model_type", "llama"))
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type {model_type!r} is none of {', '.join(MODEL_TYPES)}")
    if int(layer.get("num_hidden_layers", 1)) != 1:
        raise ValueError(f"{layer['num_hidden_layers']} layers, and heads of one layer are built")
    if config.get("use_aux_hidden_state") is False:
        raise ValueError("a head without inner rows (use_aux_hidden_state false)")
    ids = config.get(LAYER_IDS) or ()
    return EagleConfig(
        directory=str(directory),
        layer=layer,
        model_type=model_type,
        hidden=hidden,
        served_hidden=int(config.get("target_hidden_size") or hidden),
        vocab_size=vocab_size,
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab_size),
        inner=tuple(map(int, ids)),
        norm_before_residual=bool(config.get("norm_before_residual", speculators)),
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        most=_most(config),
    )


def _most(config: Mapping[str, Any]) -> int | None:
    """Tokens that a head was made to propose, where its configuration has it."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    found = methods[0].get("speculative_tokens")
    return None if found is None else int(found)


def tensors_of(head: EagleConfig) -> dict[str, StoredTensor]:
    """A head's tensors by name, without the prefix ``model.``.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    try:
        paths = weight_files(Path(head.directory))
        found = [tensor for path in paths for tensor in stored_tensors(path)]
    except (OSError, BrokenWeights) as error:
        raise CheckpointError(f"--speculative-config: {error}") from error
    return {tensor.name.removeprefix("model."): tensor for tensor in found}


def why_no_head(head: EagleConfig, info: ModelInfo, *, most: int | None, stages: int) -> str:
    """Reason why a head cannot propose for a model; empty if it can.

    ``most``: tokens that it is to propose; None: its own number. ``stages``: of the served
    model's pipeline.
    """
    text = language_config(read_json(Path(info.directory) / "config.json", required=True))
    hidden, inner = int(text.get("hidden_size") or 0), head.layers_of(info.num_layers)
    if head.served_hidden != hidden:
        return (
            f"{head.directory} reads rows of {head.served_hidden}, and {info.directory} has rows of {hidden}"
        )
    if head.vocab_size != info.vocab_size:
        return f"{head.directory} is for {head.vocab_size} tokens, and {info.directory} has {info.vocab_size}"
    if beyond := [each for each in inner if not 0 <= each < info.num_layers]:
        return (
            f"{head.directory} reads the input of layer {beyond[0]}, and {info.directory} has layers 0 to "
            f"{info.num_layers - 1}"
        )
    if stages > 1:
        return (
            f"{head.directory} reads inner rows of layers {', '.join(map(str, inner))}, and -pp {stages} has "
            f"some in other stages than the last one of {info.directory}: leave -pp out, or draft by ngram"
        )
    if most is not None and head.most is not None and most > head.most:
        return (
            f"num_speculative_tokens is {most}, and {head.directory} was made for {head.most}: set it to "
            f"{head.most}"
        )
    return _why_no_tensors(head, info, len(inner))


def _why_no_tensors(head: EagleConfig, info: ModelInfo, num_inner: int) -> str:
    """Reason why a head's tensors are not those of its configuration; empty if they are."""
    tensors, tokens = tensors_of(head), head.draft_vocab_size
    if tokens != head.vocab_size and TO_TARGET not in tensors:
        return (
            f"{head.directory} proposes {tokens} tokens of the {info.vocab_size} of {info.directory}, and "
            f"has no {TO_TARGET} that says which"
        )
    if tokens != head.vocab_size and HEAD not in tensors:
        return f"{head.directory} has no {HEAD} for its {tokens} tokens"
    wanted = {
        FC: (head.hidden, num_inner * head.served_hidden),
        TO_TARGET: (tokens,),
        HEAD: (tokens, head.hidden),
        EMBEDDING: (head.vocab_size, head.hidden),
    }
    for name, shape in wanted.items():
        found = tensors.get(name)
        if found is not None and found.shape != shape:
            return (
                f"{name} of {head.directory} is {list(found.shape)}, and its config.json says {list(shape)}"
            )
    if FC not in tensors:
        return f"{head.directory} has no {FC}"
    if EMBEDDING not in tensors and head.hidden != head.served_hidden:
        return (
            f"{head.directory} has no {EMBEDDING}, and rows of {head.hidden} where {info.directory} has "
            f"{head.served_hidden}"
        )
    if not any(name.startswith(OWN_LAYER) for name in tensors):
        return f"{head.directory} has no tensors of {OWN_LAYER[0]} or {OWN_LAYER[1]}"
    return ""
