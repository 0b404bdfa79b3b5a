"""A model's directory, read and checked: configuration, context, types, fingerprint (no torch).

Routers use it for the tokenizer's place and the context length, instances for everything, and the command
line to refuse a wrong model before any process is started.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coordinator.pooled_model import PooledModel
from engine.model.errors import CheckpointError as CheckpointError
from engine.model.model_files import read_json, readable_errors
from engine.model.model_sources import (
    config_defaults,
    has_experts_interface,
    has_states,
    language_config,
    why_not_served,
)
from engine.model.quantization.formats import Format, UnsupportedFormat, format_of, method_of, why_not_so
from engine.model.tokenizer_files import OTHER_FORMS, TOKENIZER, TokenizerFilesError, tokenizer_directory
from engine.model.weight_digest import sample_digest
from engine.model.weight_set import check_weights, weight_files
from engine.prompt_images import WHOLE_IN_WINDOWS, image_merge, image_token, images_are_whole

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_LENGTH = 2048
"""Context length of models that name none, as those without positions do."""

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names in config.json for the number of experts."""
LARGEST_FACTOR = 1e6
"""Largest factor by which a rotary embedding may be scaled; more is a mistake."""

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
EOS = "eos_token_id"


DTYPE_NAMES = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}


class ReadingStopped(Exception):
    """Stop of a reading whose result is not wanted any more."""


class ModelInfo(msgspec.Struct, frozen=True):
    """The facts of a checkpoint that do not need its weights."""

    directory: str
    architecture: str
    model_type: str
    vocab_size: int
    context_length: int
    dtype: str
    """float32, bfloat16 or float16: what ``--dtype auto`` means for this model."""
    eos_token_ids: tuple[int, ...]
    num_experts: int
    """Routed experts of a layer; 0 for a dense model."""
    num_layers: int = 0
    num_heads: int = 0
    """Query heads; 0 where config.json does not name them."""
    num_kv_heads: int = 0
    has_states: bool = False
    """Whether layers keep a recurrent state."""
    pooling: PooledModel | None = None
    """What it computes with ``--runner pooling``; None: it generates tokens."""
    image_token: int | None = None
    """Token that stands for a row of an image; None: images are refused."""
    image_merge: int = 0
    """Patches along each side of an image's row; 0: rows have no axes."""
    images_are_whole: bool = False
    """Whether each row of an image sees all of it.

    Then no step may have a part of one.
    """

    @property
    def windows_see_images(self) -> bool:
        """Whether only layers with a window see whole images."""
        return self.model_type == WHOLE_IN_WINDOWS


@readable_errors()
def read_model_info(directory: Path, *, weights: bool = True) -> ModelInfo:
    """Read config.json, generation_config.json and the tokenizer's end of a sequence.

    Also check that the weights are there if they are read.

    Raises:
        CheckpointError: a file is missing or makes no sense.
    """
    config = read_json(directory / "config.json", required=True)
    if not isinstance(config.get("text_config") or {}, dict):
        raise CheckpointError(f"{directory}/config.json has a text_config that is no object")
    text = language_config(config)
    defaults = config_defaults(str(text.get("model_type", "")))
    generation = read_json(directory / GENERATION_CONFIG)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(f"{directory}/config.json names no architecture in 'architectures'")
    if weights:
        check_weights(directory)
    vocab_size = _vocab_size(directory, text, defaults)
    return ModelInfo(
        directory=str(directory),
        architecture=str(architectures[0]),
        model_type=str(config.get("model_type", "")),
        vocab_size=vocab_size,
        context_length=_context_length(directory, text, defaults),
        dtype=_dtype(config, text),
        eos_token_ids=_eos_ids(
            vocab_size,
            generation.get(EOS),
            text.get(EOS) if config.get(EOS) is None else config[EOS],
            _tokenizer_eos(directory),
        )
        or _eos_ids(vocab_size, defaults.get(EOS)),
        num_experts=_num_experts(text, defaults),
        num_layers=_whole_number(("num_hidden_layers", "n_layer", "num_layers"), text, defaults),
        num_heads=_whole_number(("num_attention_heads", "n_head"), text, defaults),
        num_kv_heads=_whole_number(("num_key_value_heads",), text, defaults),
        has_states=has_states(text),
        image_token=image_token(config),
        image_merge=image_merge(config),
        images_are_whole=images_are_whole(config),
    )


def chosen_dtype(asked: str, info: ModelInfo, *, on_cpu: bool) -> str:
    """The data type that ``--dtype`` means for a model.

    CPUs without arithmetic of float16 compute such checkpoints in float32, which holds all their numbers.
    """
    if asked != "auto":
        return DTYPE_NAMES[asked]
    return "float32" if on_cpu and info.dtype == "float16" else info.dtype


def why_experts_stay_whole(info: ModelInfo) -> str:
    """Why the experts of a mixture-of-experts model cannot be spread over instances.

    Empty if they can.

    transformers' own code says whether a family's experts go through its experts interface.
    """
    config = read_json(Path(info.directory) / "config.json", required=True)
    text_type = str(language_config(config).get("model_type", ""))
    if has_experts_interface(text_type):
        return ""
    return f"the experts of {text_type} do not go through transformers' experts interface"


def weight_format(directory: str) -> str:
    """Quantisation method of a checkpoint's weights; ``plain`` for weights of the model's data type."""
    return method_of(read_json(Path(directory) / "config.json", required=True)) or "plain"


def format_of_weights(directory: Path) -> Format | None:
    """Format of quantised weights; None for plain ones.

    Raises:
        CheckpointError: it is a format that is not read.
    """
    try:
        return format_of(read_json(directory / "config.json", required=True))
    except UnsupportedFormat as refused:
        raise CheckpointError(f"{directory} {refused}") from refused


def angles_follow_length(directory: str) -> bool:
    """Whether rotary angles are chosen for the longest request that is served."""
    config = language_config(read_json(Path(directory) / "config.json", required=True))
    kinds = [str(each.get("rope_type", each.get("type"))) for each in _scalings(config)]
    return any(kind in ("longrope", "su") or "dynamic" in kind for kind in kinds)


@readable_errors()
def check_servable(directory: Path, *, trust_remote_code: bool) -> None:
    """Check whether config.json alone rules a model out.

    That needs neither its weights nor torch.

    Raises:
        CheckpointError: it rules the model out.
    """
    config = read_json(directory / "config.json", required=True)
    if problem := why_not_served(config, trust_remote_code=trust_remote_code):
        architecture = next(iter(config.get("architectures") or ()), None) or f"{directory}/config.json"
        raise CheckpointError(f"{architecture} {problem}")


def check_quantization(directory: Path, name: str | None, *, reads_weights: bool) -> None:
    """Check what ``--quantization`` names, before any weights are fetched.

    Raises:
        CheckpointError: it does not go with this checkpoint.
    """
    if name is None:
        return
    config = read_json(directory / "config.json", required=True)
    if problem := why_not_so(config, name, reads_weights=reads_weights):
        raise CheckpointError(problem)


@readable_errors()
def fingerprint(info: ModelInfo, *, weights: bool = True) -> str:
    """A short digest by which other models are refused before their weights are loaded.

    It covers config.json, the tokenizer, the ids that end a sequence, and every tensor's name, type, shape
    and a sample of its bytes. Copies that are cut into other files have the same one. Weights that differ
    elsewhere are found by the digest of all bytes (:mod:`engine.model.host_digest`). Without ``weights``, for
    instances that make random ones, no tensor is covered.
    """
    directory = Path(info.directory)
    digest = hashlib.sha256(msgspec.json.encode(info.eos_token_ids))
    names = ("config.json", TOKENIZER) if (directory / TOKENIZER).is_file() else ("config.json", *OTHER_FORMS)
    for name in names:
        path = directory / name
        if path.is_file():
            digest.update(name.encode() + path.read_bytes())
    if weights:
        try:
            digest.update(sample_digest(weight_files(directory)))
        except ValueError as error:
            raise CheckpointError(f"the weights in {directory} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


SAMPLING_KEYS = {key: key for key in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")} | {
    "max_new_tokens": "max_tokens"
}
"""Sampling keys of generation_config.json, and their names in requests."""


@readable_errors()
def default_sampling(directory: Path) -> dict[str, Any]:
    """Sampling defaults that the model's authors recommend (generation_config.json), vLLM's keys only."""
    generation = read_json(directory / GENERATION_CONFIG)
    return {ours: generation[key] for key, ours in SAMPLING_KEYS.items() if generation.get(key) is not None}


def _num_experts(text: dict[str, Any], defaults: dict[str, Any]) -> int:
    """Routed experts of each sparse layer; 0 for a dense model."""
    if text.get("enable_moe_block", defaults.get("enable_moe_block")) is False:
        return 0
    nested = text.get("ffn_config")  # DBRX keeps its numbers there
    return _whole_number(EXPERTS, text | (nested if isinstance(nested, dict) else {}), defaults)


def _vocab_size(directory: Path, config: dict[str, Any], defaults: dict[str, Any]) -> int:
    found = _whole_number(("vocab_size",), config, defaults)
    if not found:
        raise CheckpointError(f"{directory}/config.json gives no vocab_size above 0")
    return found


def _context_length(directory: Path, config: dict[str, Any], defaults: dict[str, Any]) -> int:
    """Context length in tokens: as stated, or as its rotary embedding is stretched to."""
    stated = _whole_number(POSITIONS, config, defaults)
    if stated < 1:
        logger.warning(
            "%s/config.json gives no context length; %d is taken", directory, DEFAULT_CONTEXT_LENGTH
        )
        return DEFAULT_CONTEXT_LENGTH
    if "gemma3" in str(config.get("model_type")):
        return stated  # Gemma 3 states what its scaling leads to
    return max([stated, *(_scaled_context(each, config, stated) for each in _scalings(config))])


def _scalings(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Parameters of rotary embeddings: one for all layers, or one for each type of layer."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict):
        return []
    return [each for each in scaling.values() if isinstance(each, dict)] or [scaling]


def _scaled_context(scaling: dict[str, Any], config: dict[str, Any], stated: int) -> int:
    """Positions to which scaled rotary embeddings stretch the trained ones.

    Parameters are read as vLLM reads them. For kinds that are not here, the stated number is the stretched
    one.
    """
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if kind not in ("yarn", "linear", "dynamic") or not isinstance(factor, int | float):
        return stated
    trained = stated
    if kind == "yarn":
        original = "original_max_position_embeddings"
        trained = _whole_number((original,), config, scaling) or stated
    return int(trained * factor) if 1 < factor < LARGEST_FACTOR else stated


def _whole_number(names: Sequence[str], config: dict[str, Any], defaults: dict[str, Any]) -> int:
    """The first number under any of these names.

    The defaults count where the config has none of the names. 0 if there is none, or none above 0.
    """
    source = config if any(name in config for name in names) else defaults
    found = (source[name] for name in names if isinstance(source.get(name), int))
    return next((int(number) for number in found if number > 0), 0)


def _dtype(*configs: dict[str, Any]) -> str:
    for config in configs:
        name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        if name in DTYPE_NAMES:
            return DTYPE_NAMES[name]
    return "float32"


def _eos_ids(vocab_size: int, *values: Any) -> tuple[int, ...]:
    """Token ids that end a sequence, of those that the model can give."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list):
            found.update(item for item in value if isinstance(item, int))
    return tuple(sorted(token_id for token_id in found if 0 <= token_id < vocab_size))


def _tokenizer_eos(directory: Path) -> object:
    """The id of the tokenizer's own end of a sequence, if it has one.

    A model tuned for chats may name the end of a turn there alone, while its other files are still those of
    the model that it was made of.
    """
    config = read_json(directory / TOKENIZER_CONFIG)
    eos = config.get("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    if not isinstance(eos, str):
        return None
    for token_id, token in _object(config.get("added_tokens_decoder")).items():
        if _object(token).get("content") == eos and token_id.isdecimal():
            return int(token_id)
    try:
        tokenizer = read_json(tokenizer_directory(directory) / TOKENIZER)  # megabytes, and rarely needed
    except TokenizerFilesError:  # callers that need it raise this
        return None
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if _object(token).get("content") == eos:
            return _object(token).get("id")
    vocab = _object(tokenizer.get("model")).get("vocab")
    if isinstance(vocab, list):  # pairs of a piece and its score, by id
        return next((i for i, pair in enumerate(vocab) if isinstance(pair, list) and pair[:1] == [eos]), None)
    return _object(vocab).get(eos)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
