"""Structure of the project: directions of imports, where torch is loaded, what no wire carries."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["parallel", "coordinator", "engine", "router"]
"""Each package may import those before it, and itself."""

MOST_MODULES = 25
"""Most modules in one folder, so that they are found."""
MOST_LINES = 6000
"""Most lines of Python and C++ in one room, rooms inside of it left out."""

COMPUTES = {
    "parallel.communicators.host_rounds",
    "parallel.communicators.rounds_communicator",
    "parallel.rounds.arithmetic",
    "parallel.rounds.contract",
    "parallel.rounds.host_chain",
    "parallel.rounds.native_calls",
    "parallel.rounds.views",
    "parallel.communicators.gloo",
    "parallel.communicators.mixed",
    "parallel.communicators.nccl",
    "parallel.communicators.network",
    "parallel.rounds.network_rounds",
    "parallel.rounds.native_network_rounds",
    "parallel.rounds.native_shared_memory_rounds",
    "parallel.rounds.plans",
    "parallel.communicators.process_group",
    "parallel.rounds.shared_memory_rounds",
    "parallel.communicators.shared_memory",
    "parallel.rounds.slots",
    "parallel.device_tables",
    "parallel.expert_parallel",
    "parallel.expert_products",
    "parallel.sliced_experts",
    "parallel.tensor_parallel",
    "parallel.tensor_plan",
}
"""The only modules below the engine that load torch.

Nothing imports them but the engine, or a call.
"""

FORBIDDEN = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
FORBIDDEN_CALLS = {"recv_pyobj", "send_pyobj", "eval", "exec"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@dataclass(frozen=True)
class Facts:
    """What the rules ask of one file."""

    docstring: str | None
    imports: frozenset[str]
    """Modules of ``import``, wherever in it."""
    names: frozenset[tuple[str, str]]
    """Modules of ``from ... import``, each with one of the names."""
    calls: frozenset[str]
    """Names of all functions and methods that it calls."""

    @property
    def top_names(self) -> set[str]:
        """Top-level names of everything that it imports."""
        modules = self.imports | {module for module, _ in self.names}
        return {module.split(".")[0] for module in modules}


@cache
def facts(path: Path) -> Facts:
    tree = ast.parse(path.read_text())
    imports, names, calls = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.update((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func
            calls.add(called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", ""))
    return Facts(ast.get_docstring(tree), frozenset(imports), frozenset(names), frozenset(calls))


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_one_way(package: str) -> None:
    above = set(ORDER[ORDER.index(package) + 1 :])
    assert sources(package)
    for path in sources(package):
        wrong = facts(path).top_names & above
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}, which stands above it"


def name_of(path: Path) -> str:
    """A module's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """The modules of this project that one imports, wherever in it."""
    found = set(facts(path).imports)
    for module, name in facts(path).names:
        found.add(f"{module}.{name}" if f"{module}.{name}" in known else module)
    return found & known


def rooms() -> list[Path]:
    """All folders of the packages that hold modules, the packages themselves among them."""
    return sorted({path.parent for package in ORDER for path in sources(package)})


def graph(room: Path) -> dict[str, set[str]]:
    """Imports between what lies in a room: modules and rooms, each room as one."""
    inside, depth = name_of(room), len(room.relative_to(ROOT).parts)
    paths = {name_of(path): path for path in sources(str(room.relative_to(ROOT)))}

    def unit_of(module: str) -> str:
        return ".".join(module.split(".")[: depth + 1])

    edges: dict[str, set[str]] = {unit_of(name): set() for name in paths if name != inside}
    for name, path in paths.items():
        if name != inside:
            edges[unit_of(name)] |= {unit_of(other) for other in imported_modules(path, set(paths))}
    return {unit: others - {unit, inside} for unit, others in edges.items()}


@pytest.mark.parametrize("room", rooms(), ids=name_of)
def test_no_imports_in_a_room_form_a_circle(room: Path) -> None:
    """What two rooms import of each other tells which one is above."""
    try:
        graphlib.TopologicalSorter(graph(room)).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


def test_no_modules_form_a_circle() -> None:
    paths = {name_of(path): path for package in ORDER for path in sources(package)}
    edges = {name: imported_modules(path, set(paths)) - {name} for name, path in paths.items()}
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("room", rooms(), ids=name_of)
def test_a_room_is_a_package_of_bounded_size(room: Path) -> None:
    assert (room / "__init__.py").exists()
    sources = [path for suffix in ("py", "cpp", "hpp") for path in room.glob(f"*.{suffix}")]
    lines = sum(len(path.read_text().splitlines()) for path in sources)
    assert lines <= MOST_LINES, f"{room.relative_to(ROOT)} has {lines} lines"


@pytest.mark.parametrize("top", [*ORDER, "tests", "examples"])
def test_no_folder_is_crowded(top: str) -> None:
    for folder in (ROOT / top, *(path for path in (ROOT / top).rglob("*") if path.is_dir())):
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, f"{folder.relative_to(ROOT)} has {len(modules)} modules"


def test_docstrings_name_modules_that_exist() -> None:
    packages = "|".join(ORDER)
    reference = re.compile(rf":(?:mod|class|func|meth|attr|data):`((?:{packages})[\w.]*)`")
    for path in (path for package in [*ORDER, "tests", "examples"] for path in sources(package)):
        for dotted in reference.findall(path.read_text()):
            assert exists(dotted), f"{path.relative_to(ROOT)} refers to {dotted}"


def exists(dotted: str) -> bool:
    """Whether a module, or a name in one, is called so (members of classes excluded)."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:length])
        path = folder.with_suffix(".py")
        if path.exists() or folder.is_dir():
            text = path.read_text() if path.exists() else (folder / "__init__.py").read_text()
            return length == len(parts) or re.search(rf"\b{parts[length]}\b", text) is not None
    return False


@pytest.mark.parametrize("package", ORDER)
def test_nothing_unpickles_or_evaluates(package: str) -> None:
    for path in sources(package):
        assert not facts(path).top_names & FORBIDDEN, path
        of_modules = {"eval"} if ".eval()" in path.read_text() else set()  # torch modules have one, too
        assert not (facts(path).calls & FORBIDDEN_CALLS) - of_modules, path


@pytest.mark.parametrize("package", [*ORDER, "examples", "tests"])
def test_groups_meet_at_no_store_of_torch(package: str) -> None:
    """They know no key, and listen to anybody (:mod:`parallel.links.meeting`)."""
    stores = {"TCPStore", "FileStore", "HashStore", "PrefixStore"}
    assert not [path for path in sources(package) if {name for _, name in facts(path).names} & stores]


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
    [
        "engine.__main__",
        "engine.executor.mp",
        "engine.host.fork_server",
        "engine.executor.nodes.__main__",
        "engine.executor.worker",
    ],
)
def test_what_comes_before_the_model_loads_no_torch(module: str) -> None:
    """An instance registers, and may be refused, before seconds are spent on libraries."""
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
            assert facts(path).docstring, f"{path} has no docstring"


def test_each_command_of_the_makefile_has_one_rule() -> None:
    text = (ROOT / "Makefile").read_text()
    names = re.search(r"^\.PHONY:(.*)$", text, re.MULTILINE)
    assert names is not None
    rules = re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE)
    assert sorted(rules) == sorted(set(names[1].split())), "written twice, or without a rule"
