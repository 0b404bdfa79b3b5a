"""The shape of the project: who imports whom, who may load torch, what is on no wire."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["parallel", "coordinator", "engine", "router"]
"""Each package may import those before it, and itself."""

COMPUTES = {
    "parallel.communicators.arithmetic",
    "parallel.communicators.gloo",
    "parallel.communicators.native_rounds",
    "parallel.communicators.plans",
    "parallel.communicators.rounds",
    "parallel.communicators.shared_memory",
    "parallel.communicators.slots",
    "parallel.expert_parallel",
    "parallel.expert_products",
    "parallel.sliced_experts",
    "parallel.tensor_parallel",
    "parallel.tensor_plan",
}
"""The only modules below the engine that load torch; nothing imports them but the engine, or a call."""

FORBIDDEN = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
FORBIDDEN_CALLS = {"recv_pyobj", "send_pyobj", "eval", "exec"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of everything a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_one_way(package: str) -> None:
    above = set(ORDER[ORDER.index(package) + 1 :])
    assert sources(package)
    for path in sources(package):
        wrong = imported(ast.parse(path.read_text())) & above
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}, which stands above it"


@pytest.mark.parametrize("package", ORDER)
def test_nothing_unpickles_or_evaluates(package: str) -> None:
    for path in sources(package):
        tree = ast.parse(path.read_text())
        assert not imported(tree) & FORBIDDEN, path
        calls = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        }
        of_modules = {"eval"} if ".eval()" in path.read_text() else set()  # torch modules have one, too
        assert not (calls & FORBIDDEN_CALLS) - of_modules, path


@pytest.mark.parametrize("package", ["router", "coordinator"])
def test_help_loads_no_torch(package: str) -> None:
    trace = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-m", package, "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert trace.stdout.startswith("usage:")
    modules = {line.rpartition("|")[2].strip().split(".")[0] for line in trace.stderr.splitlines()}
    assert "msgspec" in modules
    assert not modules & {"torch", "transformers"}


@pytest.mark.parametrize("package", ["router", "coordinator", "parallel"])
def test_no_module_outside_the_engine_loads_torch(package: str) -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources(package)
        if path.name != "__main__.py"
    }
    assert package != "parallel" or modules >= COMPUTES
    names = sorted(modules - COMPUTES)
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "found = {'torch', 'transformers'} & set(sys.modules)\nsys.exit(f'loaded {found}' if found else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    ["engine.__main__", "engine.executor.mp", "engine.fork_server", "engine.nodes.__main__", "engine.worker"],
)
def test_what_comes_before_the_model_loads_no_torch(module: str) -> None:
    """An instance registers, and may be refused, before it spends seconds on libraries; one with workers never
    does, nor does a fork server before it is told what to load."""
    code = (
        f"import sys, {module}\n"
        "found = {'torch', 'transformers', 'tokenizers', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {found}' if found else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_every_package_and_module_says_what_it_is() -> None:
    for package in ORDER:
        for path in sources(package):
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
