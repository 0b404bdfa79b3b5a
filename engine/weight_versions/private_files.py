"""Files of new weights, which are read into memory and hashed on the way.

Files that are mapped would change under their reader where a trainer writes to them, and a cut one would end
the process. So nothing of a version that is in use depends on its files any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from engine.host.shared_tensors import SharedBytes, sample_digest, sample_places
from engine.model.checkpoint import CheckpointError, ReadingStopped
from engine.model.host_digest import states_of
from engine.model.weight_digest import (
    PIECE_BYTES,
    BrokenWeights,
    StoredTensor,
    TensorRow,
    digest_of,
    row_of,
    stored_tensors,
    tensor_digest,
)
from engine.model.weight_set import files_of_tensors

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Types of numbers by their names in safetensors files."""


class PrivateFiles:
    """The files of one version, whose tensors are hashed when they are read."""

    def __init__(
        self,
        files: Sequence[Path],
        should_stop: Callable[[], bool],
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        """``should_stop`` is asked before each tensor; ``rest`` is called after each.

        Raises:
            OSError, BrokenWeights: a file cannot be read, or is none of weights.
        """
        self._should_stop = should_stop
        self._rest = rest
        self.shared: SharedBytes | None = None
        """Tensors that this host's processes share, in place of equal ones that are read."""
        self._files = list(files)
        self._states = states_of(files)
        chosen = files_of_tensors(self._files[0].parent)  # a file may have others, of an earlier version
        self.homes = {
            tensor.name: (path, tensor)
            for path in files
            for tensor in stored_tensors(path)
            if chosen.get(tensor.name, path.name) == path.name
        }
        """File of each tensor, and its place there."""
        self._rows: dict[str, TensorRow] = {}

    def __repr__(self) -> str:
        return f"<PrivateFiles {len(self._rows)} of {len(self.homes)} tensors read>"

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for _, tensor in self.homes.values())

    @property
    def bytes_to_come(self) -> int:
        """Bytes of tensors that are not shared yet, and of the largest other one.

        Raises:
            OSError: a file cannot be read.
        """
        if self.shared is None:
            return self.num_bytes
        return self.shared.bytes_to_come([self._sample(*home) for home in self.homes.values()])

    @staticmethod
    def _sample(path: Path, tensor: StoredTensor) -> tuple[int, bytes]:
        with path.open("rb", buffering=0) as file:
            parts = [
                os.pread(file.fileno(), end - begin, tensor.begin + begin)
                for begin, end in sample_places(tensor.num_bytes)
            ]
        return tensor.num_bytes, sample_digest(tensor.num_bytes, parts)

    def shared_or(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes in memory that is shared; the tensor where none has them."""
        found = None if self.shared is None else self.shared.find(tensor)
        return tensor if found is None else found.view(tensor.dtype).view(tensor.shape)

    def open(self, path: Path) -> nullcontext[PrivateFile]:
        """One of the files, as :class:`engine.model.weight_files.OpenFile` opens it."""
        names = [name for name, (home, _) in self.homes.items() if home == path]
        return nullcontext(PrivateFile(self, names))

    def read(self, name: str) -> torch.Tensor:
        """A tensor, in memory of its own or in that which is shared.

        Raises:
            OSError, CheckpointError: it cannot be read, or has changed since it was.
            ReadingStopped: ``should_stop`` returned True.
        """
        _, tensor = self.homes[name]
        if tensor.kind not in TYPES:
            raise CheckpointError(f"{name} has numbers of type {tensor.kind}, which is not known")
        held = torch.empty(tensor.num_bytes, dtype=torch.uint8)
        self._hash(name, memoryview(held.numpy()))
        return self.shared_or(held).view(TYPES[tensor.kind]).view(tensor.shape)

    def digest(self) -> str:
        """Digest of all bytes of all tensors; those that nobody has read are read now.

        Raises as :meth:`read` does.
        """
        buffer = memoryview(bytearray(PIECE_BYTES))
        for name in self.homes:
            if name not in self._rows:
                self._hash(name, buffer)
        if states_of(self._files) != self._states:
            raise CheckpointError("the files changed while they were read: write them elsewhere, then update")
        return digest_of([*self._rows.values()])

    def _hash(self, name: str, buffer: memoryview) -> None:
        if self._should_stop():
            raise ReadingStopped
        path, tensor = self.homes[name]
        try:
            with path.open("rb", buffering=0) as file:
                row = row_of(tensor, tensor_digest(path, file, tensor, buffer))
        except BrokenWeights as error:
            raise CheckpointError(str(error)) from error
        self._rest()
        if self._rows.setdefault(name, row) != row:
            raise CheckpointError(f"{path} changed while it was read: write it elsewhere, then update")


class PrivateFile:
    """One file of a version, with the methods of safetensors' ``safe_open``."""

    def __init__(self, files: PrivateFiles, names: Sequence[str]) -> None:
        self._files, self._names = files, names

    def __repr__(self) -> str:
        return f"<PrivateFile of {len(self._names)} tensors>"

    def keys(self) -> list[str]:
        return [*self._names]

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._files.read(name)

    def get_slice(self, name: str) -> PrivateSlice:
        return PrivateSlice(self._files, self._files.homes[name][1])


class PrivateSlice:
    """A tensor of which parts are wanted; all of it is read for each."""

    def __init__(self, files: PrivateFiles, tensor: StoredTensor) -> None:
        self._files, self._tensor = files, tensor

    def __repr__(self) -> str:
        return f"<PrivateSlice of {self._tensor.name}>"

    def __getitem__(self, which: Any) -> torch.Tensor:
        whole = self._files.read(self._tensor.name)
        if which is ...:
            return whole
        return self._files.shared_or(whole[which].clone(memory_format=torch.contiguous_format))

    def get_shape(self) -> list[int]:
        return [*self._tensor.shape]

    def get_dtype(self) -> str:
        return self._tensor.kind
