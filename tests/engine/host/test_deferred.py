"""Libraries that are loaded in part: deferred parts load on use, and serving needs none."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.host import deferred

ROOT = Path(__file__).parents[3]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``late`` that is deferred.

    It notes in ``ran`` each time that its code runs.
    """
    home = tmp_path / "late"
    home.mkdir()
    (home / "__init__.py").write_text(
        "import late.part\nfrom pathlib import Path\n"
        f"with Path({str(tmp_path / 'ran')!r}).open('a') as file: file.write('x')\n"
        "late.part.seen = hasattr(late, 'VALUE')\nVALUE = 7\n"
    )
    (home / "part.py").write_text("NAME = __name__\nseen = None\n")
    (home / "asks.py").write_text("from late import VALUE\n")
    monkeypatch.setattr(deferred, "DEFERRED", ("late",))
    monkeypatch.setattr(deferred, "EARLY", frozenset({"late.part"}))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    deferred.trim()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "late"]:
        del sys.modules[name]


def times_run(package: Path) -> int:
    ran = package / "ran"
    return len(ran.read_text()) if ran.exists() else 0


def test_a_deferred_module_runs_once_when_it_is_first_asked_for_something(package: Path) -> None:
    late = importlib.import_module("late")
    part = importlib.import_module("late.part")
    assert part.NAME == "late.part"
    assert times_run(package) == 0
    assert late.VALUE == 7
    assert not part.seen, "while its code runs, what it has not said yet is not there"
    with pytest.raises(AttributeError, match="'late' has no attribute 'nothing'"):
        _ = late.nothing
    assert times_run(package) == 1


def test_a_submodule_that_asks_its_parent_finds_it_whole(package: Path) -> None:
    """torchvision imports such a one; the parent imports it as well."""
    file = package / "late" / "__init__.py"
    file.write_text(file.read_text() + "import late.asks\nMORE = 8\n")
    late = importlib.import_module("late")
    asks = importlib.import_module("late.asks")
    assert asks.VALUE == late.VALUE == 7
    assert late.MORE == 8
    assert times_run(package) == 1


def test_threads_that_ask_at_once_wait_for_one_run(package: Path) -> None:
    late = importlib.import_module("late")
    start, found = threading.Barrier(8), []

    def ask() -> None:
        start.wait(timeout=30)
        found.append(late.VALUE)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [7] * 8
    assert times_run(package) == 1


def test_a_scan_of_models_is_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = tmp_path / "models"
    (models / "one").mkdir(parents=True)
    (models / "one" / "modeling_one.py").write_text("__all__ = ['One']\n")
    scanned: list[str] = []

    def scan(path: str) -> dict[object, object]:
        scanned.append(path)
        return {frozenset({"torch"}): {each.stem: {each.read_text()} for each in models.rglob("*.py")}}

    first = deferred._Scan(scan)(models)
    assert first == scan(str(models))
    first.clear()  # it is the asker's
    scanned.clear()
    for again in (deferred._Scan(scan), deferred._Scan(scan)):
        assert again(str(models)) == {frozenset({"torch"}): {"modeling_one": {"__all__ = ['One']\n"}}}
    assert scanned == []
    (models / "one" / "modeling_one.py").write_text("__all__ = ['One', 'Two']\n")
    assert deferred._Scan(scan)(models) == {
        frozenset({"torch"}): {"modeling_one": {"__all__ = ['One', 'Two']\n"}}
    }
    assert scanned == [str(models)]
    (models / "__init__.py").touch()
    assert deferred._Scan(scan)(models / "one") is not None  # not the directory of all
    assert scanned == [str(models), str(models / "one")]
    (models / "two.py").touch()
    odd = deferred._Scan(lambda path: {("torch",): {"modeling_one": ["One"]}})
    assert odd(models) == odd(models) == {("torch",): {"modeling_one": ["One"]}}, "of a kind that is not kept"


SERVES = """
import sys
from engine.host import deferred
deferred.trim()
from engine.model.checkpoint import read_model_info
from engine.model.finding import MODELS_DIRECTORY
from engine.config import SHIPPED_MODEL, EngineConfig
from engine.executor.uni import UniExecutor
from engine.sampling import SamplingParams
from engine.step import Admit, Step
executor = UniExecutor(EngineConfig(), read_model_info(MODELS_DIRECTORY / SHIPPED_MODEL), 1)
executor.load(lambda phase: None)
executor.allocate(8)
params = SamplingParams(temperature=1.0, max_tokens=4, logprobs=2)
step = Step([Admit(0, [5, 6, 7], 3, params, 1, ())], [0], [0], [3], {0: [1]})
executor.begin(step)
print(executor.finish().tokens[0])
unused = {"torch._dynamo.eval_frame", "torch._refs", "torch.distributed.tensor", "sympy"}
print(*sorted(unused & set(sys.modules)))
deferred.run_deferred()
import torch
print(torch.Generator().manual_seed(3).initial_seed(), "torch._dynamo.eval_frame" in sys.modules)
"""


def test_an_instance_computes_the_same_without_them_and_never_loads_them() -> None:
    """Also when it loads the model, which is checked against transformers' own attention then."""
    said = [
        subprocess.run(
            [sys.executable, "-c", SERVES],
            cwd=ROOT,
            env={**os.environ, deferred.OFF: off, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.splitlines()
        for off in ("0", "1")
    ]
    assert said[0][0] == said[1][0]
    assert said[0][1] == "", "loaded after all"
    assert said[0][2] == said[1][2] == "3 True", "what waits can still be had"
