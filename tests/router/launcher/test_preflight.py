from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.settings import flags
from parallel import compiler
from router.config import ServeConfig
from router.launcher.preflight import defaults_problem, ignored_revision, problem_with


def parse(*argv: str) -> ServeConfig:
    return flags.parse(ServeConfig, argv, prog="serve", description="")


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("t.json", None),
        ("nodir/t.json", "there is no directory {0}/nodir: make it, or choose another one"),
        ("", "is no file: give one, like trace.json"),
    ],
)
def test_a_trace_that_could_not_be_written_at_the_end_is_refused(
    file: str, problem: str | None, tmp_path: Path
) -> None:
    argv = ["--trace", str(tmp_path / file)]
    found = problem_with(parse(*argv))
    if problem is None:
        assert found is None
    else:
        assert problem.format(tmp_path) in (found or "")
    assert problem_with(parse(*argv, "-dp", "1", "-dpl", "0")) is None, "no instance is here"


def test_a_limit_of_files_that_no_mesh_can_run_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _which: (200, 200))
    monkeypatch.setattr("resource.setrlimit", lambda _which, _limits: None)
    assert "only 200 files may be open at once (ulimit -n)" in (problem_with(parse()) or "")


def test_a_cache_larger_than_all_memory_is_refused_before_a_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.host.cache_size.most_memory", lambda: 24 * 2**30)
    argv = ["--device", "cpu", "--kv-cache-memory-bytes"]
    assert problem_with(parse(*argv, "900G")) == (
        "--kv-cache-memory-bytes asks for 900.0 GiB for each worker, and all memory here is 24.0 GiB: lower it, "
        "or leave it out"
    )
    assert problem_with(parse(*argv, "24G")) is None
    assert problem_with(parse(*argv, "900G", "-dp", "1", "-dpl", "0")) is None, "no instance is here"


def test_a_trace_where_nobody_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    found = problem_with(parse("--trace", str(tmp_path / "t.json")))
    assert found == f"--trace {tmp_path}/t.json: {tmp_path} cannot be written: choose another directory"


def test_a_revision_is_of_models_of_the_hub(tmp_path: Path) -> None:
    assert ignored_revision(parse("--revision", "r"))
    assert ignored_revision(parse("lockstep-moe", "--revision", "r"))
    assert ignored_revision(parse(str(tmp_path), "--revision", "r"))
    assert not ignored_revision(parse("owner/name", "--revision", "r"))
    assert not ignored_revision(parse(str(tmp_path)))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            '{"temperature": -1}',
            "--override-generation-config: temperature must be a finite number at least 0",
        ),
        ('{"temperature": "hot"}', "--override-generation-config: temperature = 'hot' is no number"),
        ('{"max_new_tokens": 0}', "--override-generation-config: max_new_tokens must be at least 1"),
        ('{"temp": 1}', "--override-generation-config: 'temp' is none of repetition_penalty, temperature"),
        ('{"temperature": null}', None),
    ],
)
def test_overrides_of_sampling_defaults_are_checked(
    overrides: str, problem: str | None, tmp_path: Path
) -> None:
    found = defaults_problem(parse("--override-generation-config", overrides).http, str(tmp_path))
    assert (found is None) == (problem is None)
    assert (found or "").startswith(problem or "")


def test_overrides_are_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--override-generation-config", "0.5")
    assert "--override-generation-config must be a JSON object" in capsys.readouterr().err


def test_kernels_that_this_cpu_has_not_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    found = problem_with(parse("--numerics", "avx512")) or ""
    assert found.startswith("--numerics avx512: this CPU lacks avx512_bf16")
    assert problem_with(parse("--numerics", "avx2")) is None
    assert problem_with(parse("--numerics", "avx512", "-dp", "1", "-dpl", "0")) is None, "no instance is here"


def test_a_store_that_cannot_be_used_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://me@host/answers"
    assert problem_with(parse("--store-url", url)) is None
    assert "postgresql://USER@HOST/DATABASE" in (problem_with(parse("--store-url", "mysql://host/a")) or "")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "lockstep-mesh[postgres]" in (problem_with(parse("--store-url", url)) or "")
    with pytest.raises(SystemExit):
        parse("--store-url", url, "--store-path", "answers")
