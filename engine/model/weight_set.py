"""Files of a checkpoint's weights: which they are, and whether they are whole (no torch)."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import msgspec

from engine.model.errors import CheckpointError
from engine.model.gguf.directory import SUFFIX, WEIGHTS
from engine.model.gguf.reading import GgufError, read_header
from engine.model.model_files import read_json

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
"""Name, number and count of a file that holds a part of the weights."""
BESIDE_WEIGHTS = re.compile(r"consolidated[.-]|adapter_model\.")
"""Files beside a model's own weights: the same in another format, and adapters."""


def check_weights(directory: Path) -> None:
    """Check that all files of weights are there and none was cut short.

    Raises:
        CheckpointError: one is missing, or is broken.
    """
    for path in weight_files(directory):
        check_complete(path)


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


def files_of_tensors(directory: Path) -> dict[str, str]:
    """Names of the files of tensors, by an index; empty without one."""
    index = None if (directory / WHOLE_FILE).is_file() else _index(directory)
    found = {} if index is None else read_json(index).get("weight_map", {})
    return found if isinstance(found, dict) else {}


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
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
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


def check_complete(path: Path) -> None:
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
