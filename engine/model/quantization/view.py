"""The files of a quantised checkpoint, as if its weights were plain."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from engine.model.errors import CheckpointError
from engine.model.quantization.formats import MXFP4, Format
from engine.model.quantization.layouts import FURTHER_PARTS, KINDS
from engine.model.quantization.matrices import QuantizedMatrix, Stored, is_code
from engine.model.quantization.stacks import BLOCKS, SCALES, ExpertStack, mxfp4_stacks

logger = logging.getLogger(__name__)

WEIGHT = "weight"
NOT_READ = re.compile(
    r"\.(input_scale|input_zero_point|output_scale|[kqv]_(proj\.output_)?scale|activation_scale)$"
)
"""Scales of activations and of the KV cache, which have the model's data type here."""
ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*weight)")
"""Weight of one of several experts: whose, which, and what."""
_CODES = frozenset(kind.CODES for kind in KINDS) - {WEIGHT}
_PARTS = FURTHER_PARTS | {kind.SCALES for kind in KINDS}


class CodedFiles(ABC):
    """Files with quantised matrices, as one that safetensors shows."""

    matrices: Mapping[str, QuantizedMatrix]
    """Quantised matrices by the name of their weights."""
    stacks: Mapping[str, ExpertStack]
    """Quantised matrices of all experts of a layer, by the name of their parameter."""

    @abstractmethod
    def keys(self) -> list[str]:
        """Names of all tensors, those of matrices ending in ``weight``."""

    @abstractmethod
    def get_slice(self, name: str) -> Stored:
        """A tensor that is read when it is indexed."""

    @abstractmethod
    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""


class QuantizedFiles(CodedFiles):
    """All files of a checkpoint as one, as safetensors shows a file.

    Parts of a matrix may be in several files.
    """

    def __init__(self, files: Sequence[Any], form: Format, dtype: torch.dtype) -> None:
        """``files`` are open. Matrices are given in ``dtype``, other tensors as they are.

        Raises:
            CheckpointError: a matrix lacks a part, or one does not fit.
        """
        self._homes: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        self._form, self._dtype = form, dtype
        self.matrices = dict(self._find())
        self.stacks = {}
        if MXFP4 in form.layouts:
            self.stacks = dict(mxfp4_stacks(self._homes, form, dtype))
        parts = {name for name in self._homes if self._is_part(name)}
        self._names = [name for name in self._homes if name not in parts and not NOT_READ.search(name)]
        self._names += [*self.matrices, *self.stacks]
        self._check_experts()
        if not self.matrices and not self.stacks:
            raise CheckpointError(
                f"config.json says that weights are quantised by {form.method}, and no tensor is"
            )

    def __repr__(self) -> str:
        return f"<QuantizedFiles with {len(self.matrices)} matrices of {self._form.method}>"

    def keys(self) -> list[str]:
        return self._names

    def get_slice(self, name: str) -> Stored:
        if found := self.matrices.get(name) or self.stacks.get(name):
            return found
        stored: Stored = self._homes[name].get_slice(name)
        return stored

    def get_tensor(self, name: str) -> torch.Tensor:
        if found := self.matrices.get(name) or self.stacks.get(name):
            return found[...]
        tensor: torch.Tensor = self._homes[name].get_tensor(name)
        return tensor

    def _find(self) -> Iterator[tuple[str, QuantizedMatrix]]:
        for name, home in self._homes.items():
            owner, _, last = name.rpartition(".")
            if last not in _CODES and not (last == WEIGHT and is_code(home.get_slice(name))):
                continue
            kind = self._kind_of(owner, last)
            parts = {part: self._part(owner, part) for part in self._parts_of(owner, kind)}
            yield f"{owner}.{WEIGHT}", kind(f"{owner}.{WEIGHT}", parts, self._form, self._dtype)

    def _check_experts(self) -> None:
        """Experts of a layer are one parameter: all of them are quantised, or none.

        Raises:
            CheckpointError: some are.
        """
        quantised: dict[tuple[str, str], str] = {}
        for name in self.matrices:
            if found := ONE_EXPERT.fullmatch(name):
                quantised[found[1], found[3]] = name
        for name in self._names:
            found = ONE_EXPERT.fullmatch(name)
            if found and name not in self.matrices and (other := quantised.get((found[1], found[3]))):
                raise CheckpointError(
                    f"{name} is not quantised and {other} is: experts of a layer are quantised together, or "
                    "not at all ('ignore' in the quantization_config)"
                )

    def _kind_of(self, owner: str, last: str) -> type[QuantizedMatrix]:
        """The class that reads a matrix with codes of this last name."""
        kinds = [kind for kind in KINDS if last == kind.CODES and kind.LAYOUT in self._form.layouts]
        if not kinds:
            raise CheckpointError(
                f"{owner}.{last} is quantised in another way than config.json says ({self._form.method})"
            )
        # Of two that differ in the name of the scales: the one whose scales are there.
        return next((kind for kind in kinds if f"{owner}.{kind.SCALES}" in self._homes), kinds[-1])

    def _parts_of(self, owner: str, kind: type[QuantizedMatrix]) -> Iterator[str]:
        return (part for part in (kind.CODES, *sorted(_PARTS)) if f"{owner}.{part}" in self._homes)

    def _part(self, owner: str, part: str) -> Stored:
        stored: Stored = self._homes[f"{owner}.{part}"].get_slice(f"{owner}.{part}")
        return stored

    def _is_part(self, name: str) -> bool:
        owner, _, last = name.rpartition("_")
        if owner in self.stacks and last in (BLOCKS, SCALES):
            return True
        owner, _, last = name.rpartition(".")
        return f"{owner}.{WEIGHT}" in self.matrices and (last in _PARTS or last in _CODES or last == WEIGHT)


def log_format(form: Format) -> None:
    """Log what is done with the format of a checkpoint."""
    logger.info(
        "weights quantised by %s are widened to the model's data type while they are read", form.method
    )
    if any(each.is_rounded for each in form.activations):
        logger.info(
            "activations are rounded to 8 bits where this checkpoint says so, but for fused experts "
            "with scales of their own"
        )
    elif form.rounds_activations:
        logger.info(
            "this checkpoint is for activations in 8 bits; they stay in the model's data type here, which is "
            "more exact"
        )
