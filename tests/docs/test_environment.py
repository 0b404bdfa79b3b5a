"""The page of environment variables names each one that the packages read or set."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "run" / "environment.md"
MAPPINGS = {"environ", "environment", "variables"}
"""What a mapping of variables is called in the code."""
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]+")


def last_part(node: ast.expr) -> str:
    """``environ`` of ``os.environ``."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def trees() -> dict[str, ast.Module]:
    paths = [
        path
        for package in ("coordinator", "engine", "router", "parallel")
        for path in (ROOT / package).rglob("*.py")
    ]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def texts(tree: ast.Module) -> dict[str, list[str]]:
    """Module constants that are a text, or several."""
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(str(text))):
                found[name] = [text]
            case ast.Assign([ast.Name(name)], ast.Tuple(items)):
                found[name] = [
                    item.value
                    for item in items
                    if isinstance(item, ast.Constant) and isinstance(item.value, str)
                ]
    return found


def keys(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that stand for names of variables in one node."""
    match node:
        case ast.Call(ast.Attribute(mapping, "get" | "pop" | "setdefault"), [key, *_]) if (
            last_part(mapping) in MAPPINGS
        ):
            yield key
        case ast.Call(func, [key, *_]) if last_part(func) == "getenv":
            yield key
        case ast.Call(func, keywords=given) if last_part(func) == "NativeSource":
            yield from (each.value for each in given if each.arg == "off")
        case ast.Subscript(mapping, key) if last_part(mapping) in MAPPINGS:
            yield key
        case ast.Compare(key, [ast.In() | ast.NotIn()], [mapping]) if last_part(mapping) in MAPPINGS:
            yield key
        case ast.For(_, names) if any(last_part(inner) in MAPPINGS for inner in ast.walk(node)):
            yield names
        case ast.GeneratorExp(generators=[ast.comprehension(_, names)]) if any(
            last_part(inner) in MAPPINGS for inner in ast.walk(node)
        ):
            yield names
        case ast.Dict(names, values) if any(
            name is None and last_part(value) in MAPPINGS for name, value in zip(names, values, strict=True)
        ):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Dict):
                    yield from (name for name in inner.keys if name is not None)
        case ast.FunctionDef(name=name) if (
            name.lstrip("_").endswith("environment") and name != "_make_environment"
        ):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Dict):
                    yield from (each for each in inner.keys if each is not None)


@cache
def variables() -> dict[str, str]:
    """Each variable, with a module that names it."""
    modules = trees()
    shared = {
        name: found for tree in modules.values() for name, found in texts(tree).items() if "VARIABLE" in name
    }
    named = {}
    for module, tree in modules.items():
        known = shared | texts(tree)
        for node in ast.walk(tree):
            for key in keys(node):
                match key:
                    case ast.Constant(str(text)):
                        found = [text]
                    case ast.Tuple(items):
                        found = [item.value for item in items if isinstance(item, ast.Constant)]
                    case _:
                        found = known.get(last_part(key), [])
                named |= {text: module for text in found if VARIABLE.fullmatch(str(text))}
    return named


def test_page_names_every_variable_that_the_code_reads_or_sets() -> None:
    on_page = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", PAGE.read_text()))
    found = variables()
    missing = {name: module for name, module in found.items() if name not in on_page}
    assert not missing, f"docs/run/environment.md does not name {missing}"


def test_page_names_no_variable_of_ours_that_is_gone() -> None:
    on_page = set(re.findall(r"`(LOCKSTEP_[A-Z_]+)`", PAGE.read_text()))
    assert on_page <= set(variables())


def test_variables_are_found_however_they_are_read() -> None:
    found = variables()
    read_by_constant = {"LOCKSTEP_NATIVE_KERNELS", "LOCKSTEP_PARENT_PID", "LOCKSTEP_API_KEY", "RAY_ADDRESS"}
    set_for_children = {"OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"}
    assert read_by_constant | set_for_children | {"TMPDIR", "CXX", "GLOO_SOCKET_IFNAME"} <= set(found)
