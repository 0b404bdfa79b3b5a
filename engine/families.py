"""What transformers' code says about a family of models (no torch).

It is read as text: who asks may be a process without torch, which the code itself would load.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

EXPERTS_INTERFACE = "use_experts_implementation"
"""In modelling code, the mark of experts that can be spread."""


def has_experts_interface(model_type: str) -> bool:
    """Whether the experts of this family go through transformers' experts interface."""
    name = model_type.replace("-", "_")
    return EXPERTS_INTERFACE in _code(name, f"modeling_{name}.py")


@cache
def config_defaults(model_type: str) -> dict[str, Any]:
    """What a config.json of this type means where it says nothing: the constants among the fields of its
    configuration class. Nothing of a type that transformers does not have."""
    name = model_type.replace("-", "_")
    family = name.removesuffix("_text")  # the language part of a larger model has its class beside it
    code = _code(name, f"configuration_{name}.py") or _code(family, f"configuration_{family}.py")
    classes = {node.name: node for node in ast.parse(code).body if isinstance(node, ast.ClassDef)}
    for node in classes.values():
        fields = _constants(node, classes)
        if fields.get("model_type") == model_type:
            return fields
    return {}


def _code(directory: str, file: str) -> str:
    """Of a file of transformers' models; empty if there is none."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None or not directory.isidentifier():
        return ""
    path = Path(found.origin).parent / "models" / directory / file
    return path.read_text(errors="replace") if path.is_file() else ""


def _constants(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> dict[str, Any]:
    """What a class, or its bases in the same file, assigns to names; None where that is no constant."""
    constants: dict[str, Any] = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name) and base.id in classes:
            constants |= _constants(classes[base.id], classes)
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
                constants[name] = _value(value)
            case ast.Assign(targets=[ast.Name(name)], value=value):
                constants[name] = _value(value)
    return constants


def _value(node: ast.expr) -> Any:
    """Of a constant, or a product of numbers like 4096 * 32; None of all else."""
    match node:
        case ast.Constant(value):
            return value
        case ast.BinOp(ast.Constant(int(left)), ast.Mult(), ast.Constant(int(right))):
            return left * right
    return None
