"""What is recorded of the parts of the night, and what changed since."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.nightly import __main__ as command
from tests.nightly.parts import Part
from tests.nightly.passes import Pass, changes_since, read_passes, status_line, write_pass

PART = Part("router", ["router"], plain=["tests/router"])
PASSED = Pass("0123456789abcdef", "2026-11-28", 312, "some CPU, 2 cores")


def commit(root: Path, path: str, subject: str) -> str:
    """Commit a change of one file; its hash."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(subject)

    def run(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    run("add", path)
    run("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", subject)
    return run("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def test_changes_of_what_a_part_concerns_are_listed(repository: Path) -> None:
    first = commit(repository, "router/a.py", "One")
    assert changes_since(first, PART, repository) == []
    commit(repository, "engine/b.py", "Two")
    assert changes_since(first, PART, repository) == []
    commit(repository, "tests/router/test_a.py", "Three")
    commit(repository, "router/a.py", "Four")
    found = changes_since(first, PART, repository)
    assert found is not None
    assert [line.split(" ", 1)[1] for line in found] == ["Four", "Three"]


def test_a_commit_that_is_no_ancestor_is_unknown(repository: Path) -> None:
    commit(repository, "router/a.py", "One")
    assert changes_since("0" * 40, PART, repository) is None


@pytest.mark.parametrize(
    ("passed", "changes", "line"),
    [
        (None, None, "router                    never"),
        (
            PASSED,
            [],
            "router                    passed 2026-11-28 on 01234567 in 312 s; nothing has changed since",
        ),
        (
            PASSED,
            ["ab One"],
            "router                    passed 2026-11-28 on 01234567 in 312 s; 1 change since, the newest: ab One",
        ),
        (
            PASSED,
            ["b 2", "a 1"],
            "router                    passed 2026-11-28 on 01234567 in 312 s; 2 changes since, the newest: b 2",
        ),
        (
            PASSED,
            None,
            "router                    passed 2026-11-28 on 01234567 in 312 s; this commit is not in the history",
        ),
    ],
)
def test_a_line_tells_when_a_part_passed(passed: Pass | None, changes: list[str] | None, line: str) -> None:
    assert status_line(PART, passed, changes) == line


def test_a_pass_replaces_the_one_before_and_keeps_others(tmp_path: Path) -> None:
    record = tmp_path / "passed.json"
    assert read_passes(record) == {}
    write_pass("router", PASSED, record)
    write_pass("kernels", PASSED, record)
    later = PASSED._replace(commit="f" * 40)
    write_pass("router", later, record)
    assert read_passes(record) == {"kernels": PASSED, "router": later}


@pytest.mark.parametrize(("changed", "recorded"), [("", True), (" M router/a.py", False)])
def test_only_a_clean_checkout_is_recorded(
    changed: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    answers = {"rev-parse": "0123", "status": changed}
    monkeypatch.setattr(command, "git", lambda verb, *_: answers[verb])
    monkeypatch.setattr(command, "run_part", lambda part, parts, minutes: part.name != "kernels")
    monkeypatch.setattr(command, "write_pass", lambda name, passed: written.append(name))
    assert command.main(["router"]) == 0
    assert command.main(["kernels", "fuzz"]) == 1
    assert written == (["router", "fuzz"] if recorded else [])
