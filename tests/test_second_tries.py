from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLAKY = """
import pathlib, pytest
pytestmark = pytest.mark.mesh

@pytest.mark.parametrize("number", range({tests}))
def test_passes_the_second_time(number):
    seen = pathlib.Path(__file__).with_name(f"seen-{{number}}")
    before = seen.exists()
    seen.touch()
    assert before, f"too slow {{number}}"
"""
PLAIN = """
import pathlib

def test_fails_without_a_mark():
    with open(pathlib.Path(__file__).with_name("runs"), "a") as file:
        file.write("x")
    assert False, "wrong"
"""
BROKEN = "import pytest\n@pytest.mark.mesh\ndef test_always_fails():\n    assert False, 'always'\n"
DIES = """
import os, pathlib

def test_dies_the_first_time():
    seen = pathlib.Path(__file__).with_name("died")
    if not seen.exists():
        seen.touch()
        os.abort()
"""
SKIPS = """
import pathlib, pytest

def test_fails_then_skips():
    seen = pathlib.Path(__file__).with_name("failed")
    if seen.exists():
        pytest.skip("why not")
    seen.touch()
    assert False, "wrong"
"""
PASSES = "def test_passes():\n    pass\n"


def run(directory: Path, *flags: str, **files: str) -> subprocess.CompletedProcess[str]:
    """A run of test files with these texts."""
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n    mesh: real processes\n")
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    command = "import sys; sys.path.insert(0, sys.argv.pop(1)); from tests.second_tries import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", command, str(ROOT), "-p", "xdist", "-p", "no:cacheprovider", *flags],
        cwd=directory,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # others take a second to load
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_pass(tmp_path: Path) -> None:
    done = run(tmp_path, passes=PASSES)
    assert done.returncode == 0, done.stdout
    assert "second tr" not in done.stdout


@pytest.mark.parametrize("flags", [(), ("--numprocesses", "2")], ids=["alone", "two processes"])
def test_two_tests_get_a_second_try_and_are_listed(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = run(tmp_path, *flags, flaky=FLAKY.format(tests=2))
    assert done.returncode == 0, done.stdout
    header, *listed = done.stdout.splitlines()[-3:]
    assert header == "2 second tries (at most 2):"
    for number, line in enumerate(sorted(listed)):
        assert line.startswith(f"  passed test_flaky.py::test_passes_the_second_time[{number}]: ")
    assert len(list(tmp_path.glob("seen-*"))) == 2


def test_a_listed_test_shows_the_last_line_of_its_first_failure(tmp_path: Path) -> None:
    done = run(tmp_path, broken=BROKEN)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "  FAILED test_broken.py::test_always_fails: assert False"


def test_a_third_failed_test_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, flaky=FLAKY.format(tests=3))
    assert done.returncode == 1
    assert "no second tries: 3 tests failed" in done.stdout


def test_one_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, plain=PLAIN, flaky=FLAKY.format(tests=1))
    assert done.returncode == 1
    assert "  FAILED test_plain.py::test_fails_without_a_mark: assert False" in done.stdout
    assert (tmp_path / "runs").read_text() == "xx", "once more, and not again"


def test_a_file_that_cannot_be_loaded_decides_at_once(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "--continue-on-collection-errors",
        loaded="import nothing_of_this_name\n",
        flaky=FLAKY.format(tests=1),
    )
    assert done.returncode == 1
    assert (
        "no second tries: 1 tests failed (at most 2 are tried again), 1 files could not be loaded"
        in done.stdout
    )


def test_a_process_that_dies_decides_at_once(tmp_path: Path) -> None:
    done = run(tmp_path, "--numprocesses", "1", dies=DIES, passes=PASSES)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "  a process died in test_dies.py::test_dies_the_first_time"


def test_a_second_try_that_is_skipped_has_not_passed(tmp_path: Path) -> None:
    done = run(tmp_path, skips=SKIPS)
    assert done.returncode == 1
    assert "  FAILED test_skips.py::test_fails_then_skips: assert False" in done.stdout
