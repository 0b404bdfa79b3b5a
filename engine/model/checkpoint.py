"""A model's directory, resolved from a name, read and checked (no torch).

Routers use it for the tokenizer's place and the context length, instances for everything, and the command
line to refuse a wrong model before any process is started.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coordinator.distribution import installed_version
from engine.config import QUANTIZED_MODELS, SHIPPED_MODEL
from engine.model.errors import CheckpointError as CheckpointError
from engine.model.gguf.directory import SUFFIX, WEIGHTS, gguf_directory
from engine.model.gguf.reading import GgufError, read_header
from engine.model.model_sources import (
    config_defaults,
    has_experts_interface,
    language_config,
    why_not_served,
)
from engine.model.quantization.formats import Format, UnsupportedFormat, format_of, method_of, why_not_so
from engine.model.tokenizer_files import OTHER_FORMS, TOKENIZER, TokenizerFilesError, tokenizer_directory
from engine.model.weight_digest import sample_digest
from parallel.caches import made_once, own_directory

MODELS_DIRECTORY = Path(__file__).parents[1] / "models"

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

WANTED_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py"]
WEIGHT_FILES = ["*.safetensors"]
WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
"""Name, number and count of a file that holds a part of the weights."""
BESIDE_WEIGHTS = re.compile(r"consolidated[.-]|adapter_model\.")
"""Files beside a model's own weights: the same in another format, and adapters."""
UNWANTED_FILES = ["*/*.safetensors"]
"""Files in folders, which hold the same weights in other formats."""

DTYPE_NAMES = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}

OF_REPOSITORY = re.compile(r"([^/:\s]+/[^/:\s]+)(?:/([^:\s]+\.gguf)|:([\w.-]+))")
"""A GGUF file of a repository: owner/name/FILE.gguf, or owner/name:Q4_K_M as in vLLM."""


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


def find_model(
    name: str | None,
    revision: str | None = None,
    *,
    weights: bool = True,
    download: bool = True,
    check: Callable[[Path], None] = lambda directory: None,
) -> Path:
    """The directory of a model given as a path, shipped name or Hugging Face id.

    What must be fetched from the hub comes without the weights if they are not read on this host. Without
    ``download`` the model must be in the cache. ``check`` may refuse the model: it is called before any
    weights are fetched.

    Raises:
        CheckpointError: nothing by that name, here or on the hub; or what ``check`` raises.
    """
    directory = _find_local(name)
    if directory is not None:
        check(directory)
        return directory
    assert name is not None
    if found := OF_REPOSITORY.fullmatch(name):
        directory = _of_gguf(_gguf_of_hub(found[1], revision, found[2], found[3], download))
        check(directory)
        return directory
    directory = _of_hub(name, revision, WANTED_FILES, download)
    check(directory)
    if not weights:
        return directory
    return _of_hub(name, directory.name, WANTED_FILES + WEIGHT_FILES, download)  # of the commit just seen


def _find_local(name: str | None) -> Path | None:
    """The directory of a local model; None for a repository id of the hub.

    Raises:
        CheckpointError: the name is neither.
    """
    if name == "":  # of a variable that is not set; another model than was meant would be no help
        raise CheckpointError(
            f"the name of the model is empty: give one, or leave it out for the shipped {SHIPPED_MODEL}"
        )
    if (
        name is None or name == SHIPPED_MODEL
    ):  # also where a directory of this name is; ./lockstep-moe means that one
        return MODELS_DIRECTORY / SHIPPED_MODEL
    if name in QUANTIZED_MODELS:
        return _made(name)
    try:
        local = Path(name).expanduser()
        if local.is_dir():
            return local.resolve()
        if local.suffix == SUFFIX and local.is_file():
            return _of_gguf(local)
    except (OSError, RuntimeError) as error:  # too long, not readable, ~nobody
        raise CheckpointError(f"model {name[:200]!r} cannot be looked at: {_reason(error)}") from error
    is_local = name.startswith((".", "/", "~")) or local.exists()
    if is_local or (name.count("/") != 1 and not OF_REPOSITORY.fullmatch(name)):
        kind = "is not a directory" if local.exists() else "does not exist"
        raise CheckpointError(
            f"model {name!r} {kind}: give a directory with config.json and *.safetensors, a GGUF file, a "
            f"Hugging Face repository id (owner/name), or nothing for the shipped {SHIPPED_MODEL}"
        )
    return None


def _made(name: str) -> Path:
    """Directory of the shipped model in fewer bits, made at first use."""
    from engine.model.quantization import making  # numpy, which few need here

    digest = hashlib.sha256(f"{name} {installed_version()}".encode() + Path(making.__file__).read_bytes())
    source = MODELS_DIRECTORY / SHIPPED_MODEL
    digest.update((source / WHOLE_FILE).read_bytes())
    try:
        kept = own_directory("models") / f"{name}-{digest.hexdigest()[:16]}"
        if not kept.is_dir():
            logger.info("making %s of %s, once", name, SHIPPED_MODEL)
        return made_once(
            kept, lambda target: making.quantize_checkpoint(source, target, QUANTIZED_MODELS[name])
        )
    except OSError as error:
        raise CheckpointError(f"{name} cannot be made in {error.filename}: {_reason(error)}") from error


def _of_gguf(path: Path) -> Path:
    """Directory that is made from a GGUF file."""
    try:
        return gguf_directory(path)
    except GgufError as error:
        raise CheckpointError(str(error)) from error


def _gguf_of_hub(
    repository: str, revision: str | None, file: str | None, kind: str | None, download: bool
) -> Path:
    """A GGUF file of a repository, by its path or kind (like Q4_K_M)."""
    wanted = [file] if file else [f"*{kind}{SUFFIX}", f"*{str(kind).lower()}{SUFFIX}"]
    snapshot = _of_hub(repository, revision, [each for each in wanted if each], download)
    found = sorted({path for each in wanted if each for path in snapshot.rglob(each)})
    if len(found) != 1:
        names = ", ".join(str(path.relative_to(snapshot)) for path in found) or "none"
        raise CheckpointError(
            f"{repository} has {len(found)} GGUF files of this name ({names}): give owner/name/FILE{SUFFIX}"
        )
    return found[0]


@contextlib.contextmanager
def _as_said() -> Iterator[None]:
    """Turn errors of unreadable files into messages for the user."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or 'the model'} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _of_hub(repository: str, revision: str | None, wanted: list[str], download: bool) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=wanted,
                ignore_patterns=UNWANTED_FILES,
                local_files_only=not download,
            )
        )
    except HFValidationError as error:
        raise CheckpointError(f"model {repository!r} is no valid repository id: {error}") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"model {repository!r} is neither a local directory nor in the Hugging Face cache, and the hub "
            "cannot be reached (offline?): check the name, HF_HOME, HF_HUB_OFFLINE and the network"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"model {repository!r} could not be fetched from the hub: {error}") from error
    except Exception as error:  # transfers break with exceptions of any library below
        problem = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"model {repository!r} could not be fetched from the hub: {problem}; try again, and check the "
            "network and its proxies"
        ) from error


@_as_said()
def read_model_info(directory: Path, *, weights: bool = True) -> ModelInfo:
    """Read config.json, generation_config.json and the tokenizer's end of a sequence.

    Also check that the weights are there if they are read.

    Raises:
        CheckpointError: a file is missing or makes no sense.
    """
    config = _read_json(directory / "config.json", required=True)
    if not isinstance(config.get("text_config") or {}, dict):
        raise CheckpointError(f"{directory}/config.json has a text_config that is no object")
    text = language_config(config)
    defaults = config_defaults(str(text.get("model_type", "")))
    generation = _read_json(directory / GENERATION_CONFIG)
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
    config = _read_json(Path(info.directory) / "config.json", required=True)
    text_type = str(language_config(config).get("model_type", ""))
    if has_experts_interface(text_type):
        return ""
    return f"the experts of {text_type} do not go through transformers' experts interface"


def weight_format(directory: str) -> str:
    """Quantisation method of a checkpoint's weights; ``plain`` for weights of the model's data type."""
    return method_of(_read_json(Path(directory) / "config.json", required=True)) or "plain"


def format_of_weights(directory: Path) -> Format | None:
    """How quantised weights are stored; None where they are read as they are.

    Raises:
        CheckpointError: it is a format that is not read.
    """
    try:
        return format_of(_read_json(directory / "config.json", required=True))
    except UnsupportedFormat as refused:
        raise CheckpointError(f"{directory} {refused}") from refused


def angles_follow_length(directory: str) -> bool:
    """Whether rotary angles are chosen for the longest request that is served."""
    config = language_config(_read_json(Path(directory) / "config.json", required=True))
    kinds = [str(each.get("rope_type", each.get("type"))) for each in _scalings(config)]
    return any(kind in ("longrope", "su") or "dynamic" in kind for kind in kinds)


@_as_said()
def check_servable(directory: Path, *, trust_remote_code: bool) -> None:
    """Check whether config.json alone rules a model out.

    That needs neither its weights nor torch.

    Raises:
        CheckpointError: it rules the model out.
    """
    config = _read_json(directory / "config.json", required=True)
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
    config = _read_json(directory / "config.json", required=True)
    if problem := why_not_so(config, name, reads_weights=reads_weights):
        raise CheckpointError(problem)


def check_weights(directory: Path) -> None:
    """Check that all files of weights are there and none was cut short.

    Raises:
        CheckpointError: one is missing, or is broken.
    """
    for path in weight_files(directory):
        _check_complete(path)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted.

    They are model.safetensors, those that an index names, or those that stand there without one.

    Raises:
        CheckpointError: none there, or one that the index names is missing.
    """
    if (directory / WEIGHTS).is_symlink():  # of a directory that was made from a GGUF file
        return [directory / WEIGHTS]
    whole = directory / WHOLE_FILE
    if whole.is_file():  # what transformers reads then, whatever index or parts an earlier model left
        return [whole]
    index = _index(directory)
    if index is not None:
        return _indexed_files(index)
    files = sorted(path for path in directory.glob("*.safetensors") if not BESIDE_WEIGHTS.match(path.name))
    if not files:
        raise CheckpointError(
            f"{directory} has no *.safetensors file.{_what_else(directory)} Convert it with transformers' "
            "save_pretrained(), which writes safetensors"
        )
    return _numbered_files(files) or files


def _what_else(directory: Path) -> str:
    """Sentence about weights in formats that are not read, for an error."""
    if pickled := sorted(path.name for path in directory.glob("*.bin")):
        return f" It has {pickled[0]}, a pickle format, which is never loaded."
    if beside := sorted(path.name for path in directory.glob("*.safetensors")):
        return f" It has {beside[0]}, which is in another layout or an adapter."
    return ""


def is_laid_out_as_usual(directory: Path) -> bool:
    """Whether transformers finds the weights by itself.

    It does in one file, or by a usually named index.
    """
    return (directory / WHOLE_FILE).is_file() or (directory / INDEX_FILE).is_file()


def _index(directory: Path) -> Path | None:
    """The index of the weights; one of another name counts if there is no second."""
    usual = directory / INDEX_FILE
    if usual.is_file():
        return usual
    others = sorted(directory.glob("*.safetensors.index.json"))
    return others[0] if len(others) == 1 else None


def _indexed_files(index: Path) -> list[Path]:
    directory = index.parent
    try:
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (directory / name).is_file()]
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} has a weight_map that maps no names to files") from error
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of the weight files that its index names, "
            f"first {missing[0]}: download it again"
        )
    return [directory / name for name in names]


def _numbered_files(files: list[Path]) -> list[Path]:
    """Files of one set like name-00001-of-00003.safetensors; none if there is no such set.

    Raises:
        CheckpointError: the set lacks a file, or there are several sets.
    """
    sets: dict[tuple[str, int], dict[int, Path]] = {}
    for path in files:
        if found := NUMBERED.fullmatch(path.name):
            sets.setdefault((found[1], int(found[3])), {})[int(found[2])] = path
    if not sets:
        return []
    if len(sets) > 1:
        names = ", ".join(sorted(min(each.values()).name for each in sets.values()))
        raise CheckpointError(
            f"{files[0].parent} has several sets of weights and no {INDEX_FILE} that chooses: {names}; leave "
            "only one there"
        )
    (((name, count), parts),) = sets.items()
    missing = sorted(set(range(1, count + 1)) - parts.keys())
    if missing:
        raise CheckpointError(
            f"{files[0].parent} lacks {len(missing)} of the {count} weight files {name}-*-of-*.safetensors, "
            f"first number {missing[0]}: download it again"
        )
    return [parts[number] for number in sorted(parts)]


def _check_complete(path: Path) -> None:
    """Check that a file of weights has as many bytes as its header promises.

    A copy may have been cut short.

    Raises:
        CheckpointError: it has fewer or more.
    """
    if path.suffix == SUFFIX:
        try:
            read_header(path)
        except GgufError as error:
            raise CheckpointError(str(error)) from error
        return
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = msgspec.json.decode(file.read(min(header_bytes, size)), type=dict[str, Any])
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        promised = 8 + header_bytes + max(ends, default=0)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file, or a broken one: download it again") from error
    if promised != size:
        raise CheckpointError(
            f"{path} has {size} bytes where its header promises {promised}: download it again"
        )


@_as_said()
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


@_as_said()
def default_sampling(directory: Path) -> dict[str, Any]:
    """Sampling defaults that the model's authors recommend (generation_config.json), vLLM's keys only."""
    generation = _read_json(directory / GENERATION_CONFIG)
    return {ours: generation[key] for key, ours in SAMPLING_KEYS.items() if generation.get(key) is not None}


def _instead(directory: Path) -> str:
    """Hint for a directory without config.json: what to give instead."""
    found = sorted(directory.glob(f"*{SUFFIX}"))
    if not found:
        return f"is it a model directory? (A GGUF file of a repository: owner/name/FILE{SUFFIX})"
    names = ", ".join(path.name for path in found)
    return f"give one of its GGUF files as the model ({names}), like {found[0]}"


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path.parent} has no {path.name}: {_instead(path.parent)}")
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


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
    config = _read_json(directory / TOKENIZER_CONFIG)
    eos = config.get("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    if not isinstance(eos, str):
        return None
    for token_id, token in _object(config.get("added_tokens_decoder")).items():
        if _object(token).get("content") == eos and token_id.isdecimal():
            return int(token_id)
    try:
        tokenizer = _read_json(tokenizer_directory(directory) / TOKENIZER)  # megabytes, and rarely needed
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
