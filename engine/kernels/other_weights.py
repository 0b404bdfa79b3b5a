"""Other weights for a loaded model, which replace its own between two steps.

They are in a module of the same form. Those for kernels are laid out while steps run.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.host.background import drop_later, let_go
from engine.kernels.core import library
from engine.kernels.decoder import recognise
from engine.kernels.laid_out import LaidOut
from engine.kernels.make import let_go_of_weights
from engine.kernels.program import Program
from engine.model.errors import CheckpointError
from engine.model.quantization.attached import ATTRIBUTE, forget_codes
from engine.model.weights import LoadedModel

Tensors = dict[str, torch.Tensor]


class PreparedWeights(Protocol):
    """Weights that were prepared, and take the place of those in use."""

    def switch(self) -> None:
        """Use them from the next step on; called between two steps."""

    def discard(self) -> None:
        """Let go of them, and leave those in use as they are."""


class TorchWeights:
    """New tensors for a model that torch's operators compute."""

    def __init__(self, module: Any, tensors: Tensors) -> None:
        self._module, self._tensors = module, tensors

    def switch(self) -> None:
        """Let the model's parameters have the new tensors."""
        here = dict(self._module.named_parameters(remove_duplicate=False)) | kept_buffers(self._module)
        before = []
        for name, tensor in self._tensors.items():
            mine = here[name]
            before.append(mine.data)
            mine.data = tensor.data
            if (codes := tensor.__dict__.get(ATTRIBUTE)) is not None:
                setattr(mine, ATTRIBUTE, codes)
        let_go(before)

    def discard(self) -> None:
        """Let go of the tensors."""
        self._tensors = {}


class NativeWeights:
    """New weights, laid out for the kernels that compute the model.

    The model's module has their tensors from now on, unless they are discarded.
    """

    def __init__(self, model: LoadedModel, program: Program, tensors: Tensors) -> None:
        """Lays them out.

        Raises:
            CheckpointError: the kernels would compute another model.
        """
        kernels = library.load()
        assert kernels is not None, "the kernels compute this model"
        self._module, self._program = model.module, program
        self._before = _replace(model.module, tensors)
        self._laid_out: LaidOut | None = None
        try:
            decoder = recognise(model.module, model.layers, model.dtype)
            products = program.exchange.products if program.exchange.is_spread else None
            self._laid_out = laid_out = LaidOut(kernels, decoder, model.stage.shard.size, products)
            if laid_out.sizes != program.laid_out.sizes:
                raise CheckpointError("the kernels would compute a model of other sizes")
            laid_out.positions.grow(program.laid_out.positions.num_positions)
            let_go_of_weights(model, decoder)
        except BaseException:
            self.discard()
            raise

    def switch(self) -> None:
        """Let the program compute with them from the next step on."""
        assert self._laid_out is not None
        before = self._program.laid_out
        self._program.replace_weights(self._laid_out)
        drop_later([before, self._before])
        self._before, self._laid_out = {}, None

    def discard(self) -> None:
        """Give the module its tensors back, and let go of the new ones."""
        for tensor in _replace(self._module, self._before).values():
            forget_codes(tensor)
        self._before, self._laid_out = {}, None


def kept_buffers(module: Any) -> Tensors:
    """Buffers of a model that a checkpoint has, by name."""
    found: Tensors = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, tensor in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = tensor
    return found


def _replace(module: Any, tensors: Tensors) -> Tensors:
    """Put these tensors in the place of a module's; returns those that it had."""
    before: Tensors = {}
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        part = module.get_submodule(path)
        held = part._parameters if own in part._parameters else part._buffers
        before[name], held[own] = held[own], tensor
    return before
