"""Rotary embeddings computed by attention, in the launch that writes keys and values.

A family's layer turns queries and keys, and hands them to attention. Where its source shows that nothing
looks at them in between, its function for rotary embeddings leaves them as they are, and attention takes the
angles. That is only so in a model's call whose plan can do it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from dataclasses import dataclass
from typing import Any

import torch

CACHES = {"cache", "past_key_value", "past_key_values"}
"""Names of transformers' own cache in families' code, which is None here."""


@dataclass(frozen=True)
class LateNorm:
    """Norm over the vector of each head."""

    weight: torch.Tensor
    epsilon: float
    plus_one: bool
    """Whether factors are the weights and 1."""


@dataclass(frozen=True)
class LateRotation:
    """Angles [1, tokens, dim] by which queries and keys are still to be turned."""

    cos: torch.Tensor
    sin: torch.Tensor
    norms: tuple[LateNorm, LateNorm] | None = None
    """Norms of queries and of keys, alike but for weights; None: none are left."""


class LateTurns(threading.local):
    """Queries and keys of one layer on their way to attention, in this thread."""

    def __init__(self) -> None:
        self.on = False
        """Whether the called model may leave its queries and keys as they are."""
        self._given: tuple[torch.Tensor, torch.Tensor, LateRotation] | None = None
        self._norms: list[LateNorm] = []

    def keep_norm(self, norm: LateNorm) -> None:
        """Keep the norm of queries, then that of keys, for the next rotation."""
        self._norms.append(norm)

    def take_norms(self) -> tuple[LateNorm, LateNorm] | None:
        """Norms that queries and keys of the next rotation still need.

        Raises:
            RuntimeError: they are not just two.
        """
        if not self._norms:
            return None
        found, self._norms = self._norms, []
        if len(found) != 2:
            raise RuntimeError(
                f"{len(found)} norms of heads before a rotation: queries and keys have one each"
            )
        return found[0], found[1]

    def put(
        self, query: torch.Tensor, key: torch.Tensor, turn: LateRotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep queries and keys, which :meth:`take` must see next, and their rotation."""
        self.check()
        self._given = query, key, turn
        return query, key

    def take(self, query: torch.Tensor, key: torch.Tensor) -> LateRotation | None:
        """Rotation that these queries and keys still need; None if they are turned.

        Raises:
            RuntimeError: they are others than :meth:`put` was given.
        """
        if self._given is None:
            return None
        if query is not self._given[0] or key is not self._given[1]:
            self.check()
        turn = self._given[2]
        self._given = None
        return turn

    def check(self) -> None:
        """Raise RuntimeError if queries and keys, or their norms, were given and never taken."""
        given, norms = self._given, self._norms
        self._given, self._norms = None, []
        if norms:
            raise RuntimeError("a layer did not turn queries and keys that are not normalised yet")
        if given is not None:
            raise RuntimeError("a layer changed its queries or keys between rotary embeddings and attention")


LATE = LateTurns()


def turn_late(model: Any, plan_keyword: str) -> None:
    """Let attention turn queries and keys in calls of this model whose plan has ``turns_late``."""

    def before(_model: Any, _arguments: Any, options: dict[str, Any]) -> None:
        LATE.on = getattr(options.get(plan_keyword), "turns_late", False)

    def after(_model: Any, _arguments: Any, _output: Any) -> None:
        LATE.on = False
        LATE.check()

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, always_call=True)


def hands_over(layer: type, rotary: str) -> bool:
    """Whether a layer's ``forward`` gives attention what its rotary function gave, as it was.

    ``rotary`` is the name of that function. Read from the source: False wherever it looks different.
    """
    try:
        forward: Any = layer.forward  # type: ignore[attr-defined]
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (AttributeError, OSError, SyntaxError, TypeError):
        return False
    statements = tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else []
    turning = [index for index, each in enumerate(statements) if _calls(each, rotary)]
    if len(turning) != 1 or len(_calls(tree, rotary)) != 1:
        return False
    names = _two_names(statements[turning[0]])
    if names is None:
        return False
    uses = [each for each in statements[turning[0] + 1 :] if _named(each, names) and not _of_cache(each)]
    return len(uses) == 1 and _gives_attention(uses[0], names)


def hands_norms_over(layer: type, rotary: str) -> bool:
    """Whether a layer's ``forward`` turns what ``q_norm`` and ``k_norm`` gave, as it was.

    The layer is one that :func:`hands_over` accepts. Read from the source, as there.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(layer.forward))))  # type: ignore[attr-defined]
    assert isinstance(tree.body[0], ast.FunctionDef)
    statements = tree.body[0].body
    turning = next(index for index, each in enumerate(statements) if _calls(each, rotary))
    names = _two_names(statements[turning])
    if names is None:
        return False
    first = [each.id if isinstance(each, ast.Name) else "" for each in _calls(tree, rotary)[0].args[:2]]
    before = [each for each in statements[:turning] if _named(each, names)]
    return first == [*names] and [_normalised(each) for each in before] == [
        (names[0], "q_norm"), (names[1], "k_norm"),
    ]  # fmt: skip


def _normalised(statement: ast.stmt) -> tuple[str, str] | None:
    """Name and norm of a statement ``name = self.norm(...).transpose(1, 2)``."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, found = statement.targets[0], ast.unparse(statement.value)
    for norm in ("q_norm", "k_norm"):
        inner = f"self.{norm}("
        if isinstance(target, ast.Name) and found.startswith(inner) and found.endswith(").transpose(1, 2)"):
            moved = statement.value
            assert isinstance(moved, ast.Call)
            assert isinstance(moved.func, ast.Attribute)
            is_norm = isinstance(moved.func.value, ast.Call)
            return (target.id, norm) if is_norm and ast.unparse(moved.func.value).startswith(inner) else None
    return None


def _calls(node: ast.AST, name: str) -> list[ast.Call]:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [each for each in calls if isinstance(each.func, ast.Name) and each.func.id == name]


def _two_names(statement: ast.stmt) -> tuple[str, str] | None:
    """Names of what a statement ``query, key = ...`` assigns."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    target = statement.targets[0]
    if len(statement.targets) != 1 or not isinstance(target, ast.Tuple):
        return None
    names = [each.id for each in target.elts if isinstance(each, ast.Name)]
    return (names[0], names[1]) if len(names) == len(target.elts) == 2 else None


def _named(node: ast.AST, names: tuple[str, str]) -> list[ast.Name]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in names]


def _of_cache(statement: ast.stmt) -> bool:
    """Whether a statement acts only with transformers' own KV cache."""
    if not isinstance(statement, ast.If) or statement.orelse or not isinstance(statement.test, ast.Compare):
        return False
    test = statement.test
    return (
        isinstance(test.left, ast.Name)
        and test.left.id in CACHES
        and isinstance(test.ops[0], ast.IsNot)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )


def _gives_attention(statement: ast.stmt, names: tuple[str, str]) -> bool:
    """Whether it is ``... = attention(self, query, key, ...)`` and nothing else uses the two."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    given = [each.id if isinstance(each, ast.Name) else "" for each in statement.value.args[:3]]
    return given == ["self", *names] and len(_named(statement, names)) == 2
