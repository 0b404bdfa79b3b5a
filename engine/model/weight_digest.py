"""Digests of a checkpoint's tensors, whichever files they are cut into (no torch).

:func:`sample_digest` reads a few bytes of each tensor: most other weights are refused by it before any are
loaded. :func:`whole_digest` reads all of them. Blocks of KV caches, numerics classes and capsules depend on
it, so two checkpoints that differ in one byte never pass for each other. :mod:`engine.model.host_digest`
makes it once per host. Weights beside a checkpoint, as adapters are, have a digest of the same kind.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from engine.model.gguf.directory import SUFFIX
from engine.model.gguf.reading import read_header

MOST_SAMPLED = 2048
"""Most tensors that are sampled; of more, so many evenly spread ones by name."""
SAMPLE_BYTES = 512
"""Bytes of each sample: in the middle of a tensor, and at its end."""
PIECE_BYTES = 8 << 20
"""Bytes that are read and hashed at once, each without Python's lock."""
DIGEST_BYTES = 16
VERSION = 1
"""Raised with each change of what goes into a digest."""


class StoredTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    kind: str
    """Type of its numbers, as the file has it."""
    shape: tuple[int, ...]
    begin: int
    """Byte of the file at which its numbers begin."""
    num_bytes: int


TensorRow = tuple[str, str, tuple[int, ...], str]
"""Name, type and shape of a tensor, and the digest of its bytes in hexadecimal."""


class BrokenWeights(ValueError):
    """Refusal of a file of weights that is cut short or junk.

    The message names it.
    """


def stored_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of a file, by their places in it.

    Raises:
        OSError, GgufError, BrokenWeights: it cannot be read, or is no file of weights.
    """
    if path.suffix == SUFFIX:
        header = read_header(path)
        found = [
            StoredTensor(each.name, each.type.name, tuple(each.shape), each.begin, each.num_bytes)
            for each in header.tensors.values()
        ]
    else:
        found = list(_in_safetensors(path))
    return sorted(found, key=lambda tensor: tensor.begin)


def _in_safetensors(path: Path) -> Iterator[StoredTensor]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = msgspec.json.decode(file.read(min(length, size)), type=dict[str, dict[str, Any]])
        for name, entry in header.items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                yield StoredTensor(
                    name, entry["dtype"], tuple(entry["shape"]), 8 + length + first, end - first
                )
    except (struct.error, msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise BrokenWeights(f"{path} is no safetensors file, or a broken one ({error})") from error


def sample_digest(files: Sequence[Path]) -> bytes:
    """Digest of all tensors' names, types, shapes and a few bytes each.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    from hashlib import blake2b  # a few kilobytes: no other package is loaded for them

    tensors = {path: stored_tensors(path) for path in files}
    names = sorted(tensor.name for each in tensors.values() for tensor in each)
    step = -(-len(names) // MOST_SAMPLED) or 1
    sampled = set(names[::step])
    rows = []
    for path, stored in tensors.items():
        with path.open("rb", buffering=0) as file:
            for tensor in stored:
                digest = blake2b(digest_size=DIGEST_BYTES)
                if tensor.name in sampled:
                    for before_end in (tensor.num_bytes // 2, min(SAMPLE_BYTES, tensor.num_bytes)):
                        file.seek(tensor.begin + tensor.num_bytes - before_end)
                        digest.update(file.read(min(SAMPLE_BYTES, before_end)))
                rows.append(row_of(tensor, digest.digest()))
    return blake2b(_listed(rows), digest_size=DIGEST_BYTES).digest()


def whole_digest(files: Sequence[Path], passed: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Digest of all tensors' names, types, shapes and bytes, in hexadecimal.

    ``passed`` is called with the bytes of each piece that was read.

    Raises:
        OSError, BrokenWeights: a file cannot be read, or ends before its tensors do.
    """
    buffer = memoryview(bytearray(PIECE_BYTES))
    rows = []
    for path in files:
        with path.open("rb", buffering=0) as file:
            for tensor in stored_tensors(path):
                rows.append(row_of(tensor, tensor_digest(path, file, tensor, buffer, passed)))
    return digest_of(rows)


def tensor_digest(
    path: Path,
    file: BinaryIO,
    tensor: StoredTensor,
    buffer: memoryview,
    passed: Callable[[int], None] = lambda num_bytes: None,
) -> bytes:
    """Digest of a tensor's bytes, which are read through a buffer.

    A buffer as large as the tensor has all of them afterwards.

    Raises:
        OSError, BrokenWeights: the file cannot be read, or ends before the tensor does.
    """
    from blake3 import blake3

    digest, read = blake3(), 0
    file.seek(tensor.begin)
    keeps = len(buffer) == tensor.num_bytes
    while read < tensor.num_bytes:
        begin = read if keeps else 0
        most = min(tensor.num_bytes - read, PIECE_BYTES, len(buffer))
        count = file.readinto(buffer[begin : begin + most])  # type: ignore[attr-defined]
        if not count:
            raise BrokenWeights(f"{path} ends before {tensor.name} does")
        digest.update(buffer[begin : begin + count])
        passed(count)
        read += count
    return bytes(digest.digest(DIGEST_BYTES))


def digest_of(rows: list[TensorRow]) -> str:
    """Digest of all tensors by what is known of each, in hexadecimal."""
    from blake3 import blake3

    return str(blake3(_listed(rows)).hexdigest(DIGEST_BYTES))


def row_of(tensor: StoredTensor, digest: bytes) -> TensorRow:
    """What a digest of all weights knows of a tensor; ``digest``: that of its bytes."""
    return tensor.name, tensor.kind, tensor.shape, digest.hex()


def _listed(rows: list[TensorRow]) -> bytes:
    return msgspec.json.encode((VERSION, sorted(rows)))
