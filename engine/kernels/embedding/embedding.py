"""The embedding: recognition, weights and operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.adapters.sites import Site
from engine.kernels.core.operations import AS_FLOAT, OperationKind
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.embedding.factor import embedding_factor
from engine.kernels.embedding.per_layer import INPUTS, LayerInputs, inputs_of, without_inputs
from engine.kernels.lowering.parts import Packing
from engine.kernels.lowering.writer import Writer, factor_field
from engine.model.sharding.shard import PassThrough
from parallel.tensor_parallel import VocabularyParallel


@dataclass(frozen=True)
class Embedding:
    """The embedding of tokens."""

    weight: torch.Tensor
    """[tokens here, hidden]"""
    first: int
    """Number of the first token here."""
    is_partial: bool
    """Whether other ranks have other tokens."""
    factor: float
    positions: torch.Tensor | None
    """[positions, hidden]: learned vectors that are added, by the rank that has the first token."""
    inputs: LayerInputs | None = None
    """Weights of the inputs that layers have beside the stream."""
    module: Any = None
    """The embedding itself."""

    def matrices(self) -> list[torch.Tensor]:
        """Weights that packing lays out. The embedding itself is read as it is."""
        return [] if self.inputs is None else [self.inputs.projection]


def embedding_of(base: Any, names: Mapping[str, str], hidden: int, dtype: torch.dtype) -> Embedding | None:
    """The embedding of a base model; None on later stages.

    ``names``: of the model's parts, by role.
    """
    module = getattr(base, names["embedding"])
    if isinstance(module, PassThrough):
        return None
    if module.weight.shape[1] != hidden:
        raise NotRecognised("an embedding of another width")
    is_partial = isinstance(module, VocabularyParallel)
    positions = getattr(base, names["positions"]).weight if "positions" in names else None
    factor = embedding_factor(without_inputs(base), names, hidden, dtype)
    first = module.first if is_partial else 0
    return Embedding(module.weight, first, is_partial, factor, positions, inputs_of(base, dtype), module)


class PackedEmbedding:
    """The weights behind the embedding, and the operations of both."""

    def __init__(self, embedding: Embedding, packing: Packing) -> None:
        self.embedding = embedding
        inputs = embedding.inputs
        self.inputs = None if inputs is None else packing.packer.panels(inputs.projection, multiple=32)
        """Packed weights of the inputs that layers have beside the stream."""
        tokens, hidden = embedding.weight.shape
        site = Site((embedding.module,), (hidden,), tokens, of_tokens=True, factor=embedding.factor)
        self.site = packing.site(site)
        """Adapters of it, of the tokens here."""

    def write(self, writer: Writer) -> None:
        """Write what the stream begins with."""
        embedding = self.embedding
        weights = {
            "into": embedding.weight.data,
            "k": writer.hidden,
            "number": factor_field(embedding.factor),
            "added": writer.site_record(self.site),
        }
        if embedding.is_partial:
            area = writer.area()
            positions = embedding.positions if embedding.first == 0 else None
            writer.add(
                OperationKind.EMBED,
                out=area.address,
                more=None if positions is None else positions.data,
                n=len(embedding.weight),
                a=embedding.first,
                flags=AS_FLOAT,
                **weights,
            )
            writer.sum(area, None, 0, writer.stream)
        else:
            placed = None if embedding.positions is None else embedding.positions.data
            writer.add(OperationKind.EMBED, out=writer.stream, more=placed, **weights)
        if embedding.inputs is not None:
            self._make_inputs(writer, embedding.inputs)

    def _make_inputs(self, writer: Writer, inputs: LayerInputs) -> None:
        """Inputs of all layers beside the stream, from what the embedding gives."""
        total, out = inputs.table.shape[1], writer.buffers[INPUTS]
        writer.add(
            OperationKind.LINEAR,
            into=writer.rounded(writer.stream, self.inputs, writer.hidden),
            out=out,
            weights=self.inputs,
            n=total,
            k=writer.hidden,
            number=factor_field(inputs.projection_factor),
        )
        writer.add(
            OperationKind.INPUTS,
            into=inputs.table.data,
            out=out,
            more=inputs.norm.weights,
            factors=inputs.factors,
            n=total,
            k=inputs.width,
            a=inputs.padding,
            number=inputs.norm.eps,
        )
