"""Imports of examples from Lockstep and from each other exist.

No other test loads most of the examples.
"""

from __future__ import annotations

import ast
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
OURS = {"parallel", "coordinator", "engine", "router", "tests", "examples", "lockstep"}


def source_of(module: str) -> Path | None:
    """The file of a module of this repository.

    Some examples import those beside them by their bare names.
    """
    path = ROOT / Path(*module.split("."))
    places = [path.with_suffix(".py"), path / "__init__.py", ROOT / "examples" / f"{module}.py"]
    return next((place for place in places if place.exists()), None)


def names_in(path: Path) -> set[str]:
    """Names that a module defines or imports at top level, and its package's modules."""
    names = {place.stem for place in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
    return names


@pytest.mark.parametrize("name", ["openai_client.py", "tools.py"])
def test_without_a_mesh_an_example_says_what_it_needs(name: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        command = [sys.executable, str(ROOT / "examples" / name), "--base-url", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"no mesh answers at {url}/models: start one with make serve" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_imports_what_exists(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        source = source_of(node.module)
        assert source or node.module.split(".")[0] not in OURS, f"no module {node.module}"
        if source:
            missing = {alias.name for alias in node.names} - names_in(source)
            assert not missing, f"{node.module} has no {', '.join(sorted(missing))}"


COMMANDS = [path for path in EXAMPLES if '__name__ == "__main__"' in path.read_text()]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_a_command_finds_other_examples_from_any_directory(path: Path) -> None:
    """Python looks for modules beside the command only; the repository's root has to be added."""
    body = ast.parse(path.read_text()).body
    imports = [
        number
        for number, node in enumerate(body)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("examples.")
    ]
    added = [
        number for number, node in enumerate(body) if ast.unparse(node).startswith("sys.path.insert(0, ")
    ]
    assert not imports or (added and added[0] < imports[0]), "sys.path lacks the repository's root"


def test_a_null_model_stands_in_for_a_real_one() -> None:
    """Benchmarks of everything around a model run on it."""
    from engine.sampling import SamplingParams
    from engine.step import Admit, Step
    from examples.benchmarks.null_model import NullExecutor

    executor = NullExecutor(vocabulary=50, block_size=16, most=4)
    kinds = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logprobs=1), SamplingParams()]
    for params in kinds:  # what the native list chooses itself, what it does not
        admit = Admit(slot=0, token_ids=[1, 2, 3], num_prompt=3, params=params, seed=0, barred_ids=())
        executor.begin(Step([admit], [0], [0], [3], {0: [0]}))
        token = executor.finish().tokens[0]
        assert token is not None
        assert 0 <= token < 50


def test_a_directory_may_have_a_blank_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that are one text are split into words again."""
    model = tmp_path / "a model"
    from examples.benchmarks import bench_growth, peer_systems
    from examples.benchmarks.routing import real
    from examples.benchmarks.routing.cluster import StepTime

    assert shlex.split(bench_growth.flags_of(model, "auto", "-dp 1"))[0] == str(model)
    values = {"model": model, "dtype": "auto", "port": 1, "rpc_port": 2}
    for system in peer_systems.SYSTEMS.values():
        assert str(model) in system.words(**values)
    model.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(model))
    with real.waiting(StepTime("any", 1.0, 1.0, 1.0), 1.0) as steps:
        assert Path(shlex.split(steps.arguments("any"))[0]).name == real.SHIPPED.name
