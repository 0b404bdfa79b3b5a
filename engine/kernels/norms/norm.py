"""Recognition of norms: by the mean square or the deviation; weights, or 1 + weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.kernels.core.stand_ins import NotRecognised, distance, made_up, with_parts
from parallel.tensor_parallel import ParallelRMSNorm


@dataclass(frozen=True)
class OverRanks:
    """A norm's numbers that other tensor-parallel ranks have."""

    width: int
    """Numbers of all ranks."""
    is_first: bool
    """Whether no rank before this one has the same numbers."""


@dataclass(frozen=True)
class Norm:
    """A norm of rows."""

    weights: torch.Tensor
    """[width] float32. Behind them, if the norm is centred, what is added in the end."""
    eps: float
    is_centred: bool
    """Whether it is by the deviation from the mean, and not by the numbers themselves."""
    over: OverRanks | None = None
    """Numbers that other ranks have; None: all of them are here."""


def norm_of(module: Any, width: int) -> Norm:
    """Recognise a norm of rows of this width.

    Of the known kinds it is the nearest one; whether that is what it computes is tried elsewhere.
    """
    if not isinstance(module, ParallelRMSNorm):
        return _nearest(module, width)
    return replace(_nearest(alone(module), width), over=OverRanks(module.whole_width, module.is_first))


def alone(norm: Any) -> Any:
    """A norm of this rank's part alone, without the other ranks' squares."""
    if not isinstance(norm, ParallelRMSNorm):
        return norm
    made = with_parts(norm, {})
    made.be_alone()
    return made


def _nearest(module: Any, width: int) -> Norm:
    weight, bias, eps = _parts(module, width)
    shifted = [weight + 1, torch.zeros(width)]
    given = made_up(4, width, seed=1, dtype=torch.float32) + 0.5
    own = getattr(module, "weight", None)
    found = module(given.to(torch.float32 if own is None else own.dtype)).float()
    mean = given.mean(-1, keepdim=True)
    by_size = given * (given.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    by_deviation = (given - mean) * ((given - mean).pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    kinds = [
        (distance(found, by_size * weight), Norm(weight, eps, is_centred=False)),
        (distance(found, by_size * shifted[0]), Norm(shifted[0], eps, is_centred=False)),
        (
            distance(found, by_deviation * weight + bias),
            Norm(torch.cat([weight, bias]), eps, is_centred=True),
        ),
        (
            distance(found, by_deviation * shifted[0] + bias),
            Norm(torch.cat([shifted[0], bias]), eps, is_centred=True),
        ),
    ]
    return min(kinds, key=lambda kind: kind[0])[1]


def _parts(module: Any, width: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Weight, bias and epsilon of a norm.

    The tensors are copies in float32, since the model's own are emptied.
    """
    own = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not own.keys() <= {"weight", "bias"} or any(each.numel() != width for each in own.values()):
        raise NotRecognised(f"a norm of type {type(module).__name__}")
    if not isinstance(eps, float):
        if own:
            raise NotRecognised(f"a norm of type {type(module).__name__} without a number that it adds")
        eps = _measured(module, width)
    weight, bias = (
        own[name].detach().flatten().to(torch.float32, copy=True) if name in own else otherwise
        for name, otherwise in (("weight", torch.ones(width)), ("bias", torch.zeros(width)))
    )
    return weight, bias, eps


def _measured(module: Any, width: int) -> float:
    """Epsilon of a norm without weights, measured from its results."""
    given = made_up(1, width, seed=1, dtype=torch.float32) * 1e-3
    given -= given.mean()
    added = float((given.norm() / module(given).norm()).square() - given.square().mean())
    return float(f"{max(added, 0.0):.1e}")
