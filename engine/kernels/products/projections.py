"""Linear layers of attention and MLPs, however a family names them and joins them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.products.activations import NAMES as ACTIVATIONS
from parallel.tensor_parallel import RowParallelLinear


@dataclass(frozen=True)
class Linear:
    """A linear layer."""

    module: Any
    weight: torch.Tensor
    """[outputs, inputs]"""
    bias: torch.Tensor | None
    is_partial: bool
    """Whether other ranks have other inputs."""
    is_turned: bool
    """Whether the module keeps its weight the other way round."""

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0])

    @property
    def own_bias(self) -> torch.Tensor | None:
        """A copy of the bias in float32, since the model's own tensor is emptied."""
        return None if self.bias is None else self.bias.detach().to(torch.float32, copy=True)


def joined_bias(projections: Sequence[Linear]) -> torch.Tensor | None:
    """Copies of biases in a row, in float32; zeros for projections that have none."""
    if all(each.bias is None for each in projections):
        return None
    return torch.cat(
        [
            torch.zeros(each.outputs) if each.bias is None else each.bias.detach().float()
            for each in projections
        ]
    )


def linear_of(module: Any) -> Linear:
    """A linear layer of one of the known kinds."""
    is_partial, is_turned = type(module) is RowParallelLinear, type(module) is Conv1D
    usual = is_turned or type(module) is torch.nn.Linear
    is_turned |= is_partial and module.is_turned
    if module.splits_input if is_partial else not usual:
        raise NotRecognised(f"a projection of type {type(module).__name__}")
    weight = module.weight.data.t() if is_turned else module.weight
    if weight.shape[1] % 2:
        raise NotRecognised("a projection of an odd width")
    return Linear(module, weight, module.bias, is_partial, is_turned)


def whole(module: Any) -> Linear:
    """A linear layer that has all of its inputs."""
    found = linear_of(module)
    if found.is_partial:
        raise NotRecognised("partial sums in the middle of a layer")
    return found


SEPARATE = "q_proj", "k_proj", "v_proj"
VALUES_OF_KEYS = SEPARATE[:2]
"""Names where what gives keys gives values, too."""
QUERIES_ALONE = SEPARATE[:1]
"""Names where keys and values are another layer's."""
JOINED = "qkv_proj", "c_attn"
OUT = "o_proj", "out_proj", "dense", "c_proj"
GATED = "gate_proj", "up_proj", "down_proj"
UNNAMED = "w1", "w3", "w2"
"""Names of gate, up and down where the activation is no part of the MLP."""
JOINED_GATE = ("gate_up_proj", "down_proj"), ("input_linear", "output_linear")
PLAIN = ("up_proj", "down_proj"), ("c_fc", "c_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h")


def attention_projections(module: Any) -> tuple[dict[str, Any], str]:
    """Modules before attention by name, and the name of the one behind it.

    The former are those of queries, keys and values; or of queries and keys, which are values, too; or of
    queries alone; or one for all of them.
    """
    names = {name for name, _ in module.named_children()}
    out = [name for name in OUT if name in names]
    joined = [name for name in JOINED if name in names]
    separate = [each for each in (SEPARATE, VALUES_OF_KEYS, QUERIES_ALONE) if names.issuperset(each)]
    inward = list(separate[0]) if separate else joined
    if len(out) != 1 or len(inward) not in (1, 2, 3):
        raise NotRecognised(f"{type(module).__name__} has the parts {', '.join(sorted(names))}")
    return {name: getattr(module, name) for name in inward}, out[0]


def is_joined(inward: dict[str, Any]) -> bool:
    """Whether one module gives queries, keys and values."""
    return set(inward) <= set(JOINED)


def mlp_projections(module: Any) -> list[Any] | None:
    """The linear layers of an MLP, in order; None if it has others.

    They are gate, up and down; gate and up joined, and down; or up and down.
    """
    names = {name for name, part in module.named_children() if next(part.parameters(), None) is not None}
    names -= set(ACTIVATIONS)
    for kind in (GATED, UNNAMED, *JOINED_GATE, *PLAIN):
        if names == set(kind):
            return [getattr(module, name) for name in kind]
    return None
