"""Files that sentence-transformers puts beside a model: modules, pooling, prompts (no torch)."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from engine.model.errors import CheckpointError
from engine.model.model_files import read_json

MODULES = "modules.json"
DENSE_WEIGHTS = "model.safetensors"
"""File with the weights of a Dense layer, in its folder."""
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
OTHER_MODES = tuple(f"pooling_mode_{each}_tokens" for each in ("max", "mean_sqrt_len", "weightedmean"))
POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last": "last"}
"""Values of ``pooling_mode``, which newer files have."""
LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files with the longest input of a model."""
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


class DenseLayer(msgspec.Struct, frozen=True):
    """A layer behind the pooling that changes the length of embeddings."""

    directory: str
    outputs: int
    has_bias: bool
    activation: str
    """Name of a class of ``torch.nn``."""


class SentenceModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of sentence-transformers say about a model."""

    is_given: bool = False
    """Whether there are any."""
    pooling: str = ""
    """cls, mean or last; empty: not named."""
    normalizes: bool = False
    dense: tuple[DenseLayer, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    max_tokens: int = 0
    """Longest input; 0: not named."""


def read_sentence_files(directory: Path) -> SentenceModel:
    """Read the files of sentence-transformers, as far as there are any.

    Raises:
        CheckpointError: they ask for what is not built.
    """
    modules = _modules(directory / MODULES)
    named = read_json(directory / "config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (named.get("prompts") or {}).items()}
    pooling, normalizes, dense = "", False, []
    for module in modules:
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise CheckpointError(f"{directory}/{MODULES} has a path outside of the model: {path}")
        if kind == "Pooling":
            pooling = _pooling(directory / path / "config.json")
        elif kind == "Normalize":
            normalizes = True
        elif kind == "Dense":
            dense.append(_dense(directory / path))
        elif kind not in ("Transformer", "Dropout"):
            raise CheckpointError(f"{directory}/{MODULES} has a module {kind}, which is not built")
    lengths = (read_json(directory / name).get("max_seq_length") for name in LENGTH_FILES)
    return SentenceModel(
        is_given=bool(modules),
        pooling=pooling,
        normalizes=normalizes,
        dense=tuple(dense),
        prompts=prompts,
        default_prompt=str(named.get("default_prompt_name") or ""),
        max_tokens=next((each for each in lengths if isinstance(each, int) and each > 0), 0),
    )


def _modules(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise CheckpointError(f"{path} holds no list of modules")
    return content


def _pooling(path: Path) -> str:
    config = read_json(path)
    if isinstance(mode := config.get("pooling_mode"), str):
        if mode not in POOLINGS:
            raise CheckpointError(f"{path} asks for the pooling {mode!r}: cls, mean and last token are built")
        return POOLINGS[mode]
    found = [mode for key, mode in MODES.items() if config.get(key)]
    other = [key for key in OTHER_MODES if config.get(key)]
    if other or len(found) > 1:
        raise CheckpointError(
            f"{path} asks for more than one of cls, mean and last token, which is not built"
        )
    return found[0] if found else ""


def _dense(directory: Path) -> DenseLayer:
    config = read_json(directory / "config.json", required=True)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    outputs = config.get("out_features")
    if activation not in ACTIVATIONS or not isinstance(outputs, int):
        raise CheckpointError(f"{directory}/config.json asks for a layer that is not built ({activation})")
    return DenseLayer(str(directory), outputs, bool(config.get("bias", True)), activation)
