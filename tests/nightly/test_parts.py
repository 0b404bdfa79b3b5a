"""Each test belongs to one part of the night, and each part can run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import __main__ as command
from tests.nightly.parts import MESH, PLAIN, ROOT, Part, commands_of, owner, read_parts, value_of

PARTS = read_parts()


def test_every_test_is_run_by_one_part() -> None:
    tests = [str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")]
    assert len(tests) > 300
    for kind in ("plain", "mesh"):
        claims = {name: getattr(part, kind) for name, part in PARTS.items()}
        assert [test for test in tests if owner(test, claims) is None] == []


def test_paths_exist() -> None:
    missing = [path for part in PARTS.values() for path in part.paths if not (ROOT / path).exists()]
    assert missing == []


def test_no_path_is_in_two_parts() -> None:
    for kind in ("plain", "mesh"):
        paths = [path for part in PARTS.values() for path in getattr(part, kind)]
        assert len(paths) == len(set(paths))


def test_a_part_runs_something() -> None:
    assert [part.name for part in PARTS.values() if not (part.plain or part.mesh or part.commands)] == []


def test_the_longest_path_owns_a_test() -> None:
    claims = {"all": ["tests"], "engine": ["tests/engine"], "kernels": ["tests/engine/kernels"]}
    assert owner("tests/engine/kernels/test_a.py", claims) == "kernels"
    assert owner("tests/engine/kernels_too/test_a.py", claims) == "engine"
    assert owner("tests/test_a.py", claims) == "all"
    assert owner("elsewhere/test_a.py", claims) is None


def test_a_part_leaves_out_what_others_name_more_exactly() -> None:
    engine = Part("engine", [], plain=["tests/engine"], mesh=["tests/mesh"])
    kernels = Part("kernels", [], plain=["tests/engine/kernels"], commands=["python -m x 'a b'"])
    parts = {"engine": engine, "kernels": kernels}
    assert commands_of(engine, parts) == [
        [sys.executable, *PLAIN, "tests/engine", "--ignore=tests/engine/kernels"],
        [sys.executable, *MESH, "tests/mesh"],
    ]
    assert commands_of(kernels, parts) == [
        [sys.executable, *PLAIN, "tests/engine/kernels"],
        [sys.executable, "-m", "x", "a b"],
    ]


def test_a_variable_may_be_what_a_command_prints() -> None:
    assert value_of("avx2") == "avx2"
    assert value_of("$(python -c 'print(6 * 7)')") == "42"
    with pytest.raises(subprocess.CalledProcessError):
        value_of("$(python -c 'raise SystemExit(3)')")


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "parts.toml"
    page.write_text('[[part]]\nname = "a"\nconcerns = []\n[[part]]\nname = "a"\nconcerns = []\n')
    with pytest.raises(ValueError, match="'a' stands twice"):
        read_parts(page)


def test_an_unknown_part_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["kernel"])
    assert ended.value.code == 2
    assert "there is no part 'kernel'; there are kernels," in capsys.readouterr().err


@pytest.mark.parametrize(("code", "passes"), [("pass", True), ("raise SystemExit(1)", False)])
def test_a_part_passes_if_its_commands_do(code: str, passes: bool) -> None:
    part = Part("some", [], commands=[f"python -c '{code}'"])
    assert command.run_part(part, {"some": part}, 1.0) is passes


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    late = tmp_path / "late"
    wait = f"import pathlib, time; time.sleep(60); pathlib.Path('{late}').touch()"
    part = Part("some", [], commands=[f'python -c "{wait}"'])
    assert not command.run_part(part, {"some": part}, 0.2 / 60)
    assert not late.exists()
