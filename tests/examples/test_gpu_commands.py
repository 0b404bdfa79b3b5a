"""The three commands for a borrowed GPU, on a CPU with its packages."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from examples.benchmarks.gpu import gpu_bits, gpu_first, gpu_limits

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples/benchmarks/gpu/README.md"
THERE = ("torch", "triton", "transformers", "numpy", "setuptools", "pip")
"""Packages of a borrowed machine, with all that they need."""
BLOCKING = """
import sys
from importlib.machinery import PathFinder

MISSING = {names!r}


class Borrowed(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname in MISSING else PathFinder.find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Borrowed
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_needs(names: Iterable[str]) -> set[str]:
    """These distributions and all that they need, as far as they are installed."""
    found, waiting = set[str](), [*names]
    while waiting:
        name = normal(waiting.pop())
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                waiting.append(need.name)
    return found


def brought() -> set[str]:
    """Packages that the page has one download as wheels."""
    (command,) = re.findall(r"pip download .*?```", PAGE.read_text(), re.DOTALL)
    lines = command.replace("```", "").split("\\\n")[1:]
    return {normal(name) for line in lines for name in line.split()}


@pytest.fixture
def borrowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes find no packages but those of a borrowed machine and of the page."""
    allowed = with_needs(THERE) | brought() | {"lockstep-mesh"}
    modules = importlib.metadata.packages_distributions()
    names = {name for name, owners in modules.items() if not allowed & set(map(normal, owners))}
    assert "openai" in names
    folder = tmp_path / "borrowed"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKING.format(names=sorted(names)))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # else pytest loads those that are not there
    monkeypatch.setenv("HYPOTHESIS_NO_PLUGINS", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    monkeypatch.delenv("LOCKSTEP_COVERAGE", raising=False)  # no branches of theirs are measured
    return tmp_path


def test_the_wheels_of_the_page_are_all_that_lockstep_and_its_tests_need() -> None:
    needed = with_needs(["lockstep-mesh", "pytest", "pytest-timeout"]) - with_needs(
        ["torch", "triton", "numpy"]
    )
    missing = needed - with_needs(["transformers"]) - {"lockstep-mesh"} - brought()
    assert not missing


def test_tests_of_kernels_are_found_with_these_packages(borrowed: Path) -> None:
    paths = ["tests/engine/attention/test_triton_attention.py", "tests/engine/gpu", "tests/engine/compute"]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *paths]
    result = gpu_first.call(command, 100.0, borrowed / "log")
    assert result["status"] == 0, result


@pytest.mark.nightly
def test_bits_are_rehearsed(borrowed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = borrowed / "results.json"
    arguments = ["--device", "cpu", "--tiny", "--output-json", str(output), "--without", "tests"]
    status = gpu_bits.main(arguments)
    results = json.loads(output.read_text())
    assert status == 0, results
    cells = results["operators"]["cells"]
    assert {each["mode"] for each in cells} == {"default", "batch-invariant"}
    assert results["operators"]["batch-invariant"]["differ"] == []
    assert "batch-invariant (" in capsys.readouterr().out, "the price of a step"


@pytest.mark.nightly
def test_speed_is_rehearsed_beside_another_checkout(
    borrowed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = borrowed / "results.json"
    arguments = ["--device", "cpu", "--tiny", "--output-json", str(output), "--before", str(ROOT)]
    others = ["qwen3-0.6b", "qwen3-30b-a3b", "quantised products", "prompts without graphs"]
    status = gpu_first.main([*arguments, "--without", "tests", "peer", "mesh", *others])
    results = json.loads(output.read_text())
    assert status == 0, results
    for name in ("prompts", "prompts before"):
        assert [each["tokens"] for each in results[name]["prompts"]] == [40, 100]
        assert all(each["ms"] > 0 and each["step_ms"] > 0 for each in results[name]["prompts"])
    assert "prompts before" in capsys.readouterr().out


@pytest.mark.nightly
def test_long_contexts_are_rehearsed(borrowed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = borrowed / "results.json"
    arguments = [
        "--device",
        "cpu",
        "--tiny",
        "--output-json",
        str(output),
        "--without",
        "deaths",
        "tests",
        "mesh",
    ]
    status = gpu_limits.main(arguments)
    results = json.loads(output.read_text())
    assert status == 0, results
    assert [each["tokens"] for each in results["context qwen3-0.6b"]["prompts"]] == [93, 3000]
    assert list(results["context qwen3-0.6b"]["memory"]) == [
        "before", "weights", "largest step", "cache and graphs",
    ]  # fmt: skip
    assert "3000 tokens" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_pretended_device_idles_less_where_steps_are_scheduled_ahead(borrowed: Path) -> None:
    output = borrowed / "host_share.json"
    command = [sys.executable, "-m", "examples.benchmarks.gpu.host_share", "--rows", "1", "8"]
    command += ["--output-len", "60", "--output-json", str(output)]
    result = gpu_first.call(command, 100.0, borrowed / "log")
    assert result["status"] == 0, result
    results = json.loads(output.read_text())["results"]
    for after, ahead in zip(results[::2], results[1::2], strict=True):
        assert (after["ahead"], ahead["ahead"]) == (False, True)
        assert ahead["median_idle_ms"] < after["median_idle_ms"]


@pytest.mark.nightly
@pytest.mark.mesh
def test_deaths_are_rehearsed(borrowed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = borrowed / "results.json"
    arguments = [
        "--device",
        "cpu",
        "--tiny",
        "--output-json",
        str(output),
        "--without",
        "context",
        "tests",
        "mesh",
    ]
    status = gpu_limits.main(arguments)
    results = json.loads(output.read_text())
    assert status == 0, results
    for name in ("killed, experts spread", "killed"):
        killed = results[name]
        assert [each["first_other_token"] for each in killed["streams"]] == [None] * 3
        assert killed["victim"] in [each["rank"] for each in killed["streams"]]
        assert any("are back after" in line for line in killed["lines"])
    assert any("recovered in epoch" in line for line in results["killed, experts spread"]["lines"])
    assert "its streams paused" in capsys.readouterr().out


def test_a_command_that_is_cut_leaves_what_it_had(borrowed: Path) -> None:
    output = borrowed / "results.json"
    command = [sys.executable, "-m", "examples.benchmarks.gpu.gpu_limits", "--device", "cpu", "--tiny"]
    command += ["--output-json", str(output), "--without", "deaths", "tests", "mesh"]
    with subprocess.Popen(command, cwd=ROOT, env=gpu_first.environment(), start_new_session=True) as process:
        while not output.exists():
            assert process.poll() is None
        process.kill()
    assert "environment" in json.loads(output.read_text())


def test_all_commands_fit_nine_and_a_half_minutes() -> None:
    for command in (gpu_bits, gpu_first, gpu_limits):
        assert command.MOST_SECONDS + 10.0 <= 570.0
