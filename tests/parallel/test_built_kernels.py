"""Shared objects that were compiled before: which one a CPU takes, without a compiler."""

from __future__ import annotations

import ctypes
import logging
import shutil
from pathlib import Path

import pytest

from parallel import compiler
from parallel.built_kernels import DIRECTORY_VARIABLE, TARGETS, file_name, target_for
from router.tools.build_kernels import main

NEEDS = {target.name: target.needs for target in TARGETS}
AVX2_ONLY = ["-fopenmp", "-mno-avx512f", "-mno-amx-tile", "-mno-amx-bf16"]


@pytest.mark.parametrize(
    ("features", "flags", "name"),
    [
        (NEEDS["amx"], [], "amx"),
        (NEEDS["avx512vbmi"], [], "avx512vbmi"),
        (NEEDS["avx512"], [], "avx512"),
        (NEEDS["avxvnni"], [], "avxvnni"),
        (NEEDS["avxvnni"] | NEEDS["avx512"], [], "avx512"),
        (NEEDS["avxvnni"] | NEEDS["amx"], ["-mno-avx512f"], "avxvnni"),
        (NEEDS["avxvnni"], ["-mno-avxvnni"], "avx2"),
        (NEEDS["avx2"], [], "avx2"),
        (NEEDS["avx512vbmi"] - {"avx512_bf16"}, [], "avx512fvbmi"),
        (NEEDS["avx512"] - {"avx512_bf16"}, [], "avx512fvnni"),
        (NEEDS["avx512"] - {"avx512_bf16", "avx512_vnni"}, [], "avx512f"),
        (NEEDS["avx512"], ["-mno-avx512bf16"], "avx512fvnni"),
        (NEEDS["avx512f"] - {"avx512vl"}, [], "avx2"),
        (NEEDS["amx"], AVX2_ONLY, "avx2"),
        (NEEDS["avx2"] - {"fma"}, [], None),
        (NEEDS["neon"] | {"bf16"}, [], "neon"),
    ],
)
def test_a_cpu_takes_the_best_target_that_it_can_run(
    features: frozenset[str], flags: list[str], name: str | None
) -> None:
    target = target_for(features, flags)
    assert (target and target.name) == name


def test_a_changed_header_or_option_has_another_name(tmp_path: Path) -> None:
    source, header = tmp_path / "seven.cpp", tmp_path / "seven.hpp"
    source.write_text('#include "seven.hpp"')
    names = []
    for text, flags in (("1", []), ("2", []), ("2", ["-DX"]), ("2", ["-DX", "-mno-avx512f"])):
        header.write_text(text)
        names.append(file_name(TARGETS[-1], source, [header], flags))
    assert len(set(names)) == 3
    assert names[2] == names[3], "an option that only turns features off names a target, not another file"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here")
    if target_for(compiler.cpu_flags(), []) is None:
        pytest.skip("no target is for this CPU")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "seven.cpp"
    path.write_text('extern "C" int seven() { return 7; }\n')
    return path


def test_what_was_built_ahead_needs_no_compiler(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / "built"
    built.mkdir()
    target = target_for(compiler.cpu_flags(), [])
    assert target is not None
    with compiler.ahead(built, target):
        path = compiler.compiled(source, [])
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(built))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    found = compiler.compiled(source, [], symbols=["seven"])
    assert found == path
    assert ctypes.CDLL(str(found)).seven() == 7


def test_a_directory_of_another_version_is_named_and_passed_over(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "built"))
    assert compiler.compiled(source, []).is_relative_to(tmp_path / "cache")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert "seven.cpp is compiled" in said[0]


def test_an_unknown_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "out"), "--target", "avx1024"]) != 0
    assert (
        "avx1024 is not known: there are amx, avx512vbmi, avx512, avx512fvbmi, avx512fvnni"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
