"""Directories of weight versions that are put together from parts (no torch).

A trainer may hand over some tensors alone. The version is a directory all the same: an index names the file
of each tensor, new or of the version before, and each file is a link. So an instance that joins later reads
it as any other checkpoint, and files that have not changed are known by their place.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from engine.model.errors import CheckpointError
from engine.model.weight_digest import StoredTensor, stored_tensors
from engine.model.weight_set import INDEX_FILE, check_complete, files_of_tensors, weight_files
from engine.weight_versions.contract import WeightsRefused

LINK = "weights-{:05}.safetensors"
"""Names of links, by the numbers of files in a version."""

FLOATS = {"F64": ("<d", 8), "F32": ("<f", 4), "F16": ("<e", 2), "BF16": ("<f", 2)}
"""Form for ``struct``, and bytes in a file, of each type of numbers."""

Homes = dict[str, tuple[Path, StoredTensor]]


def homes_of(source: Path) -> Homes:
    """File and place of each tensor of a directory, or of one safetensors file.

    Raises:
        OSError, CheckpointError, BrokenWeights: a file is missing, cut off, or none of weights.
    """
    if source.is_dir():
        files, chosen = weight_files(source), files_of_tensors(source)
    else:
        files, chosen = [source], {}
    homes: Homes = {}
    for path in files:
        check_complete(path)
        for tensor in stored_tensors(path):
            if chosen.get(tensor.name, path.name) == path.name:
                homes[tensor.name] = path, tensor
    return homes


def assemble(base: Path, parts: Sequence[Path], into: Path) -> Path:
    """Put a version together from the one before and parts, of which later ones count.

    ``into``: the directory that is made, if one is needed. Returns the directory to read.

    Raises:
        WeightsRefused: a part cannot be read.
    """
    try:
        homes = homes_of(base)
        for part in parts:
            homes |= (found := homes_of(part))
        if len(parts) == 1 and parts[0].is_dir() and found.keys() >= homes.keys():
            return parts[0]
    except (OSError, CheckpointError, ValueError) as error:
        raise WeightsRefused(str(error)) from error
    links: dict[Path, str] = {}
    for path, _ in homes.values():
        links.setdefault(path.resolve(), LINK.format(len(links)))
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, link in links.items():
        (into / link).symlink_to(path)
    weight_map = {name: links[path.resolve()] for name, (path, _) in homes.items()}
    (into / INDEX_FILE).write_bytes(msgspec.json.encode({"metadata": {}, "weight_map": weight_map}))
    return into


def remove_unneeded(room: Path, old: Path, new: Path) -> None:
    """Remove a version, and directories with its files, unless the new one needs them.

    What is not in ``room`` stays.
    """
    needed = {new, *_homes_of_links(new)}
    for directory in {old, *_homes_of_links(old)} - needed:
        if directory.parent == room:
            shutil.rmtree(directory, ignore_errors=True)


def _homes_of_links(directory: Path) -> Iterator[Path]:
    for path in directory.glob("*.safetensors"):
        yield path.resolve().parent


def first_numbers(homes: Homes, name: str, most: int) -> list[float]:
    """The first numbers of a tensor, as floats.

    Raises:
        KeyError: there is no such tensor, or one of a type that has no floats.
        OSError: its file cannot be read.
    """
    path, tensor = homes[name]
    form, size = FLOATS[tensor.kind]
    with path.open("rb") as file:
        file.seek(tensor.begin)
        data = file.read(min(tensor.num_bytes, most * size))
    if tensor.kind == "BF16":  # the upper halves of float32
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    return [number for (number,) in struct.iter_unpack(form, data)]
