from __future__ import annotations

from pathlib import Path

import pytest

from parallel.caches import cache_directory, own_directory


def test_caches_are_where_the_user_wants_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory("kernels") == tmp_path / ".cache" / "lockstep" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert cache_directory("kernels") == tmp_path / "c" / "lockstep" / "kernels"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(OSError, match="XDG_CACHE_HOME"):
        cache_directory("kernels")


def test_a_cache_that_cannot_be_made_names_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError, match=r"set XDG_CACHE_HOME to a directory.*file"):
        own_directory("kernels")
