"""Search for a model: a path, a shipped name, or a hub repository (no torch)."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path

from coordinator.distribution import installed_version
from engine.config import QUANTIZED_MODELS, SHIPPED_HEAD, SHIPPED_MODEL
from engine.model.errors import CheckpointError
from engine.model.gguf.directory import SUFFIX, gguf_directory
from engine.model.gguf.reading import GgufError
from engine.model.model_files import reason_of
from engine.model.weight_set import WHOLE_FILE
from parallel.caches import made_once, own_directory

logger = logging.getLogger(__name__)

MODELS_DIRECTORY = Path(__file__).parents[1] / "models"
WANTED_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py"]
WEIGHT_FILES = ["*.safetensors"]
UNWANTED_FILES = ["*/*.safetensors"]
"""Files in folders, which hold the same weights in other formats."""
OF_REPOSITORY = re.compile(r"([^/:\s]+/[^/:\s]+)(?:/([^:\s]+\.gguf)|:([\w.-]+))")
"""A GGUF file of a repository: owner/name/FILE.gguf, or owner/name:Q4_K_M as in vLLM."""


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
    if name == SHIPPED_HEAD:
        return MODELS_DIRECTORY / SHIPPED_HEAD
    if name in QUANTIZED_MODELS:
        return _made(name)
    try:
        local = Path(name).expanduser()
        if local.is_dir():
            return local.resolve()
        if local.suffix == SUFFIX and local.is_file():
            return _of_gguf(local)
    except (OSError, RuntimeError) as error:  # too long, not readable, ~nobody
        raise CheckpointError(f"model {name[:200]!r} cannot be looked at: {reason_of(error)}") from error
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
        raise CheckpointError(f"{name} cannot be made in {error.filename}: {reason_of(error)}") from error


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
