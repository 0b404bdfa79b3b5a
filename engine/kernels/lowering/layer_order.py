"""Order of the parts of a layer: norms, attention, MLP and sums.

The layer's own code runs on made-up rows, with stand-ins for its parts.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.attention.base import CHOSEN_KEYS, LAYER_ATTRIBUTE, PLAN_KEYWORD
from engine.kernels.core.base_model import is_mixer
from engine.kernels.core.stand_ins import Gives, NotRecognised, distance, made_up, with_parts

CLOSE = 1e-6
"""Distance of two ways to compute the same, if a factor was rounded to float32."""
DIGITS = 12
"""Decimals of a factor that are not due to rounding."""


@dataclass(frozen=True)
class Inside:
    """Names of an MLP's and a mixture's parts, with norms of their own.

    The mixture is given what the MLP's norm is given; what both give is added up behind their norms.
    """

    mlp: str
    router: str
    experts: str
    before_experts: str
    behind_mlp: str
    behind_experts: str


@dataclass(frozen=True)
class AttentionBeside:
    """Attention beside a recurrence, which reads the same rows."""

    attention: str
    """Its name."""
    factor_in: float
    """Factor on what it reads, of what the recurrence does."""
    factors: tuple[float, float]
    """Factors on what the recurrence gives, and on what it gives."""


@dataclass(frozen=True)
class Order:
    """Names of a layer's parts, by their place."""

    attention: str | None
    """The part that looks at other tokens; None in a layer without one."""
    mlp: str | None
    """None in a layer without one."""
    beside: str | None
    """An MLP of the mixture's rows, whose result is added to the mixture's."""
    inside: Inside | None
    """What stands in the place of the MLP, whose name is its MLP's."""
    before_attention: str | None
    behind_attention: str | None
    before_mlp: str | None
    behind_mlp: str | None
    is_parallel: bool
    """Whether the MLP sees what attention sees, and not what it adds."""
    factor: float
    """Factor on what attention and the MLP add."""
    stream_factor: float
    """Factor on all that the layer gives."""
    side: AttentionBeside | None = None
    """Attention beside the part that looks at other tokens."""


def order_of(layer: Any, hidden: int) -> Order:
    """The order of a layer's parts."""
    if hasattr(layer, ROUTER) and hasattr(layer, EXPERTS):
        return _order_of_both(layer, hidden)
    mixers, mlp, beside, norms = _parts(layer)
    attention = next(iter(mixers), None)
    rows = made_up(1, 3, hidden, seed=1)
    if attention is None or mlp is None:
        return _order_of_one(layer, attention, mlp, norms, rows)
    both = [mlp] if beside is None else [mlp, beside]
    results = {
        name: made_up(1, 3, hidden, seed=2 + number) for number, name in enumerate([*mixers, *both, *norms])
    }
    mixed = {name: _as_given(layer, name, results[name]) for name in mixers}
    parts = {name: Gives(result) for name, result in (results | mixed).items()}
    try:
        found = _run(layer, parts, rows)
    except ValueError:  # what the MLP gives is taken apart: its routing stands beside it
        parts = {name: Gives(result) for name, result in (results | mixed).items()}
        parts[mlp] = Gives((results[mlp], None))
        found = _run(layer, parts, rows)
    if any(len(part.given) != 1 for part in parts.values()):
        raise NotRecognised(f"{type(layer).__name__} does not use each of its parts once")
    given = {name: part.given[0].reshape(rows.shape) for name, part in parts.items()}
    if beside is not None:
        if not torch.equal(given.pop(beside), given[mlp]):
            raise NotRecognised(f"{type(layer).__name__} gives its two MLPs different rows")
        results[mlp] = results[mlp] + results.pop(beside)
    side = None if len(mixers) == 1 else _joined_side(mixers, mlp, rows, results, given, found)
    order = _ordered(type(layer).__name__, attention, mlp, rows, results, given, found)
    return replace(order, beside=beside, side=side)


def _joined_side(
    mixers: list[str],
    mlp: str,
    rows: torch.Tensor,
    results: dict[str, torch.Tensor],
    given: dict[str, torch.Tensor],
    found: torch.Tensor,
) -> AttentionBeside:
    """Attention beside a recurrence, whose result is joined to the recurrence's."""
    recurrence, attention = mixers
    added = [rows, results[recurrence], results.pop(attention), results[mlp]]
    _, *factors, of_mlp = (
        torch.linalg.lstsq(torch.stack([each.flatten() for each in added], dim=1), found.flatten()[:, None])
        .solution.flatten()
        .tolist()
    )
    of_both = round(factors[0] / of_mlp, DIGITS), round(factors[1] / of_mlp, DIGITS)
    results[recurrence] = of_both[0] * added[1] + of_both[1] * added[2]
    read, seen = given[recurrence], given.pop(attention)
    factor_in = round(float((seen * read).sum() / read.square().sum()), DIGITS)
    if distance(seen, factor_in * read) > CLOSE:
        raise NotRecognised("attention beside a recurrence that reads other rows")
    return AttentionBeside(attention, factor_in, of_both)


def _as_given(layer: Any, name: str, result: torch.Tensor) -> Any:
    """A result in a mixer's form: attention has weights beside it, some chosen keys."""
    if not hasattr(getattr(layer, name), LAYER_ATTRIBUTE):
        return result
    chooses = CHOSEN_KEYS in inspect.signature(type(layer).forward).parameters
    return (result, None, None) if chooses else (result, None)


def _order_of_one(
    layer: Any, attention: str | None, mlp: str | None, norms: list[str], rows: torch.Tensor
) -> Order:
    """The order of a layer with one part: attention, a recurrence or an MLP."""
    kind, part = type(layer).__name__, attention or mlp
    assert part is not None
    results = {name: made_up(*rows.shape, seed=2 + number) for number, name in enumerate([part, *norms])}
    parts = {name: Gives(result) for name, result in results.items()}
    for name in norms:
        parts[name].weight = torch.nn.Parameter(rows.new_empty(0))  # some layers read its type
    parts[part] = Gives(results[part] if attention is None else _as_given(layer, part, results[part]))
    found = _run(layer, parts, rows)
    if any(len(each.given) != 1 for each in parts.values()):
        raise NotRecognised(f"{kind} does not use each of its parts once")
    given = {name: each.given[0].reshape(rows.shape) for name, each in parts.items()}
    before = next((name for name in norms if torch.equal(results[name], given[part])), None)
    behind = next((name for name in norms if torch.equal(results[part], given[name])), None)
    if {before, behind} - {None} != set(norms):
        raise NotRecognised(f"{kind} has a norm in another place")
    added = results[behind or part]
    both = torch.stack([rows.flatten(), added.flatten()], dim=1)
    stream_factor, of_part = torch.linalg.lstsq(both, found.flatten()[:, None]).solution.flatten().tolist()
    factor = round(of_part / stream_factor, DIGITS)
    if (
        distance(found, stream_factor * (rows + factor * added)) > CLOSE
        or distance(given[before or part], rows) > CLOSE
    ):
        raise NotRecognised(f"{kind} adds up its parts in another way")
    return Order(
        attention=attention,
        mlp=mlp,
        beside=None,
        inside=None,
        before_attention=before if mlp is None else None,
        behind_attention=behind if mlp is None else None,
        before_mlp=None if mlp is None else before,
        behind_mlp=None if mlp is None else behind,
        is_parallel=False,
        factor=factor,
        stream_factor=round(stream_factor, DIGITS),
    )


def _run(layer: Any, parts: dict[str, Gives], rows: torch.Tensor) -> torch.Tensor:
    count = rows.shape[1]
    found = with_parts(layer, parts)(
        rows,
        attention_mask=None,
        position_ids=torch.arange(count)[None],
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
        raise NotRecognised(f"{layer} has a norm in another place")
    added = [results[norm or part] for norm, part in zip(behind, (attention, mlp), strict=True)]
    stream_factor, of_attention, _ = (
        torch.linalg.lstsq(
            torch.stack([each.flatten() for each in (rows, *added)], dim=1), found.flatten()[:, None]
        )
        .solution.flatten()
        .tolist()
    )
    factor = round(of_attention / stream_factor, DIGITS)
    sequential = rows + factor * added[0]
    seen = [given[norm or part] for norm, part in zip(before, (attention, mlp), strict=True)]
    is_parallel = distance(seen[1], rows) < CLOSE
    if (
        distance(found, stream_factor * (sequential + factor * added[1])) > CLOSE
        or distance(seen[0], rows) > CLOSE
        or not (is_parallel or distance(seen[1], sequential) < CLOSE)
    ):
        raise NotRecognised(f"{layer} adds up its parts in another way")
    names = before[0], behind[0], before[1], behind[1]
    return Order(attention, mlp, None, None, *names, is_parallel, factor, round(stream_factor, DIGITS))


def _order_of_both(layer: Any, hidden: int) -> Order:
    """The order of a layer with an MLP and a mixture side by side."""
    kind, children = type(layer).__name__, _children(layer)
    attention = next((name for name, part in children.items() if hasattr(part, LAYER_ATTRIBUTE)), "")
    wide = [name for name, part in children.items() if any(each.ndim > 1 for each in part.parameters())]
    dense = [name for name in wide if name not in (attention, ROUTER, EXPERTS)]
    norms = [name for name in children if name not in wide]
    if not attention or len(dense) != 1 or any(True for _ in layer.named_parameters(recurse=False)):
        raise NotRecognised(f"{kind} has the parts {', '.join(sorted(children))}")
    mlp, rows = dense[0], made_up(1, 3, hidden, seed=1)
    names = [attention, mlp, EXPERTS, *norms]
    results = {name: made_up(1, 3, hidden, seed=2 + number) for number, name in enumerate(names)}
    parts = {name: Gives(result) for name, result in results.items()}
    parts |= {attention: Gives((results[attention], None)), ROUTER: Gives((None, None, None))}
    found = _run(layer, parts, rows)
    if any(len(part.given) != 1 for part in parts.values()):
        raise NotRecognised(f"{kind} does not use each of its parts once")
    given = {name: part.given[0].reshape(rows.shape) for name, part in parts.items()}

    inside = _inside(kind, mlp, norms, results, given)
    results[mlp] = results[inside.behind_mlp] + results[inside.behind_experts]
    for name in (EXPERTS, inside.before_experts, inside.behind_mlp, inside.behind_experts):
        del results[name], given[name]
    return replace(_ordered(kind, attention, mlp, rows, results, given, found), inside=inside)


def _inside(
    kind: str, mlp: str, norms: list[str], results: dict[str, torch.Tensor], given: dict[str, torch.Tensor]
) -> Inside:
    """Places of the norms around an MLP and a mixture."""

    def norm(one: dict[str, torch.Tensor], other: torch.Tensor) -> str:
        found = [name for name in norms if torch.equal(one[name], other)]
        if len(found) != 1:
            raise NotRecognised(f"{kind} has a norm in another place")
        return found[0]

    before, before_mlp = norm(results, given[EXPERTS]), norm(results, given[mlp])
    if not all(torch.equal(given[name], given[before_mlp]) for name in (before, ROUTER)):
        raise NotRecognised(f"{kind} gives its MLP and its mixture different rows")
    behind = norm(given, results[mlp]), norm(given, results[EXPERTS])
    return Inside(mlp, ROUTER, EXPERTS, before, *behind)


ROUTER, EXPERTS = "router", "experts"
"""Names of a mixture's parts where they are parts of the layer itself."""


def _children(layer: Any) -> dict[str, Any]:
    return {
        name: part
        for name, part in layer.named_children()
        if not isinstance(part, torch.nn.Dropout | torch.nn.Identity)
    }


def _parts(layer: Any) -> tuple[list[str], str | None, str | None, list[str]]:
    """Names of mixers (a recurrence first), of the MLP, one beside a mixture, and norms."""
    children = _children(layer)
    attention = [name for name, part in children.items() if is_mixer(part)]
    attention.sort(key=lambda name: hasattr(children[name], LAYER_ATTRIBUTE))
    wide = [name for name, part in children.items() if any(each.ndim > 1 for each in part.parameters())]
    mlp = sorted(
        (name for name in wide if name not in attention),
        key=lambda name: not hasattr(children[name], "experts"),
    )
    beside = mlp.pop() if len(mlp) == 2 and hasattr(children[mlp[0]], "experts") else None
    numbers = len(attention), len(mlp)
    is_known = numbers in ((1, 1), (1, 0), (0, 1), (2, 1))
    if not is_known or any(True for _ in layer.named_parameters(recurse=False)):
        raise NotRecognised(f"{type(layer).__name__} has the parts {', '.join(sorted(children))}")
    norms = [name for name in children if name not in (*attention, *mlp, beside)]
    return attention, next(iter(mlp), None), beside, norms
