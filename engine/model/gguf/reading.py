"""The header of a GGUF file: metadata, and where each tensor is (no torch).

The `format`_ keeps metadata, a table of tensors, and their numbers in one file. All numbers in it are little
endian.

.. _format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values, as :mod:`struct` names them."""
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
ALIGNMENT = 32

Shape = tuple[int, ...]


class GgufError(ValueError):
    """Refusal of a GGUF file. The message names what is wrong and what to do."""


@dataclass(frozen=True)
class TensorType:
    """A type of stored numbers: blocks of so many, each of so many bytes."""

    name: str
    numbers: int
    num_bytes: int


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
"""Types of tensors that are read, by their numbers in the file."""
UNQUANTISED = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file."""

    name: str
    shape: Shape
    """Outer dimensions first, as torch has them."""
    type: TensorType
    begin: int
    """Byte of the file at which its numbers begin."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row along the last dimension."""
        return self.shape[-1] // self.type.numbers * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    """Header of a GGUF file: metadata, and the place of each tensor."""

    metadata: dict[str, Any]
    """Values by key. Arrays of text are left out where they were not asked for."""
    tensors: dict[str, TensorEntry]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


def read_header(path: Path, *, texts: bool = False) -> GgufHeader:
    """The header of a file. ``texts``: with arrays of text, which are the vocabulary.

    Raises:
        GgufError: it is no GGUF file, one that was cut short, or one with tensors that are not read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reading(path, content, texts).header()
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, GgufError):
            raise
        raise GgufError(f"{path} is no GGUF file, or a broken one ({error}): get it again") from error


class _Reading:
    """Cursor over the bytes of a header."""

    def __init__(self, path: Path, content: mmap.mmap, texts: bool) -> None:
        self._path, self._content, self._texts = path, content, texts
        self._at = 0

    def header(self) -> GgufHeader:
        if self._content[:4] != MAGIC:
            raise GgufError(f"{self._path} does not begin as a GGUF file does: get it again")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            raise GgufError(
                f"{self._path} is of version {version} of GGUF, and versions 2 and 3 are read: convert the "
                "model again with a newer llama.cpp"
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text()
            if (value := self._value(self._number("I"))) is not None:
                metadata[key] = value
        if "general.architecture" not in metadata:
            raise GgufError(f"{self._path} names no architecture (general.architecture): get it again")
        if int(metadata.get("split.count") or 1) > 1:
            raise GgufError(
                f"{self._path} is one of {metadata['split.count']} files of a model: join them with "
                "llama-gguf-split --merge"
            )
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment") or ALIGNMENT)
        begin = -(-self._at // alignment) * alignment
        tensors = {
            name: TensorEntry(name, shape, kind, begin + offset) for name, shape, kind, offset in found
        }
        for tensor in tensors.values():
            if tensor.begin + tensor.num_bytes > len(self._content):
                raise GgufError(
                    f"{self._path} ends before {tensor.name} does, at byte {len(self._content)} of at least "
                    f"{tensor.begin + tensor.num_bytes}: it was cut short, get it again"
                )
        return GgufHeader(metadata, tensors)

    def _tensor(self) -> tuple[str, Shape, TensorType, int]:
        name, dimensions = self._text(), self._number("I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise GgufError(f"{self._path}: {name} has {dimensions} dimensions: get the file again")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in TYPES:
            raise GgufError(
                f"{self._path}: {name} is of the type {_type_name(kind)}, which is not read: use a file "
                f"whose tensors are of {', '.join(each.name for each in TYPES.values())}"
            )
        if shape[-1] % TYPES[kind].numbers:
            raise GgufError(
                f"{self._path}: {name} has rows of {shape[-1]} numbers, and blocks of {TYPES[kind].name} "
                f"have {TYPES[kind].numbers}: get the file again"
            )
        return name, shape, TYPES[kind], offset

    def _value(self, kind: int) -> Any:
        """A value; None for an array that is left out."""
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}")
        of, count = self._number("I"), self._number("Q")
        if of in NUMBERS:
            return list(self._take(f"<{count}{NUMBERS[of]}", count * struct.calcsize(NUMBERS[of])))
        read: Callable[[], Any] = self._text if self._texts else self._skip_text
        if of != STRING:
            raise ValueError(f"an array of values of type {of}")
        found = [read() for _ in range(count)]
        return found if self._texts else None

    def _number(self, kind: str) -> Any:
        return self._take(f"<{kind}", struct.calcsize(f"<{kind}"))[0]

    def _take(self, layout: str, size: int) -> tuple[Any, ...]:
        if self._at + size > len(self._content):
            raise ValueError("it ends within its header")
        found = struct.unpack_from(layout, self._content, self._at)
        self._at += size
        return found

    def _text(self) -> str:
        size = self._number("Q")
        if self._at + size > len(self._content):
            raise ValueError("it ends within its header")
        self._at += size
        return self._content[self._at - size : self._at].decode(errors="replace")

    def _skip_text(self) -> None:
        size = self._number("Q")
        self._at += size


def _type_name(kind: int) -> str:
    """Name of a type, where the package that knows all of them is there."""
    try:
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(kind).name)
    except (ImportError, ValueError):
        return f"number {kind}"
