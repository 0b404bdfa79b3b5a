"""Order of the parts of a layer: norms, attention, MLP and sums.

The layer's own code runs on made-up rows, with stand-ins for its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.base import LAYER_ATTRIBUTE, PLAN_KEYWORD
from engine.kernels.recognition.stand_ins import Gives, NotUsual, distance, made_up, with_parts

CLOSE = 1e-6
"""Distance of two ways to compute the same, if a factor was rounded to float32."""
DIGITS = 12
"""Decimals of a factor that are not due to rounding."""


@dataclass(frozen=True)
class Order:
    """Names of a layer's parts, by their place."""

    attention: str
    mlp: str
    before_attention: str | None
    behind_attention: str | None
    before_mlp: str | None
    behind_mlp: str | None
    is_parallel: bool
    """Whether the MLP sees what attention sees, and not what it adds."""
    factor: float
    """Factor on what attention and the MLP add."""


def order_of(layer: Any, hidden: int) -> Order:
    """The order of a layer's parts."""
    attention, mlp, norms = _parts(layer)
    rows = made_up(1, 3, hidden, seed=1)
    results = {
        name: made_up(1, 3, hidden, seed=2 + number) for number, name in enumerate([attention, mlp, *norms])
    }
    parts = {name: Gives(result) for name, result in results.items()}
    parts[attention] = Gives((results[attention], None))
    try:
        found = _run(layer, parts, rows)
    except ValueError:  # what the MLP gives is taken apart: its routing stands beside it
        parts |= {name: Gives(results[name]) for name in norms}
        parts |= {attention: Gives((results[attention], None)), mlp: Gives((results[mlp], None))}
        found = _run(layer, parts, rows)
    if any(len(part.given) != 1 for part in parts.values()):
        raise NotUsual(f"{type(layer).__name__} does not use each of its parts once")
    given = {name: part.given[0].reshape(rows.shape) for name, part in parts.items()}
    return _ordered(type(layer).__name__, attention, mlp, rows, results, given, found)


def _run(layer: Any, parts: dict[str, Gives], rows: torch.Tensor) -> torch.Tensor:
    count = rows.shape[1]
    found = with_parts(layer, parts)(
        rows,
        attention_mask=None,
        position_ids=torch.arange(count)[None],
        past_key_values=None,
        use_cache=False,
        position_embeddings=(torch.ones(1, count, 2), torch.zeros(1, count, 2)),
        **{PLAN_KEYWORD: None},
    )
    result: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return result


def _ordered(
    layer: str,
    attention: str,
    mlp: str,
    rows: torch.Tensor,
    results: dict[str, torch.Tensor],
    given: dict[str, torch.Tensor],
    found: torch.Tensor,
) -> Order:
    norms = results.keys() - {attention, mlp}

    def giver(of: str) -> str | None:
        """The norm whose result a part is given."""
        return next((name for name in norms if torch.equal(results[name], given[of])), None)

    def taker(of: str) -> str | None:
        """The norm that is given a part's result."""
        return next((name for name in norms if torch.equal(results[of], given[name])), None)

    before, behind = (giver(attention), giver(mlp)), (taker(attention), taker(mlp))
    if set(before + behind) - {None} != norms:
        raise NotUsual(f"{layer} has a norm in another place")
    added = [results[norm or part] for norm, part in zip(behind, (attention, mlp), strict=True)]
    factors = torch.linalg.lstsq(
        torch.stack([each.flatten() for each in added], dim=1), (found - rows).flatten()[:, None]
    ).solution.flatten()
    factor = round(float(factors[0]), DIGITS)
    sequential = rows + factor * added[0]
    seen = [given[norm or part] for norm, part in zip(before, (attention, mlp), strict=True)]
    is_parallel = distance(seen[1], rows) < CLOSE
    if (
        distance(found, sequential + factor * added[1]) > CLOSE
        or distance(seen[0], rows) > CLOSE
        or not (is_parallel or distance(seen[1], sequential) < CLOSE)
    ):
        raise NotUsual(f"{layer} adds up its parts in another way")
    return Order(attention, mlp, before[0], behind[0], before[1], behind[1], is_parallel, factor)


def _parts(layer: Any) -> tuple[str, str, list[str]]:
    """Names of attention, the MLP and the norms."""
    children = {
        name: part
        for name, part in layer.named_children()
        if not isinstance(part, torch.nn.Dropout | torch.nn.Identity)
    }
    attention = [name for name, part in children.items() if hasattr(part, LAYER_ATTRIBUTE)]
    wide = [name for name, part in children.items() if any(each.ndim > 1 for each in part.parameters())]
    mlp = [name for name in wide if name not in attention]
    if len(attention) != 1 or len(mlp) != 1 or any(True for _ in layer.named_parameters(recurse=False)):
        raise NotUsual(f"{type(layer).__name__} has the parts {', '.join(sorted(children))}")
    return attention[0], mlp[0], [name for name in children if name not in (*attention, *mlp)]
