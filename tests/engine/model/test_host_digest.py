"""The digest of weights is made once per host, and anew after a change."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.model import host_digest as module
from engine.model.checkpoint import CheckpointError
from engine.model.host_digest import MOST_KEPT, HostDigest, host_digest, states_of
from engine.model.weight_digest import whole_digest
from engine.model.weight_set import WHOLE_FILE

LONG_AGO = 1_600_000_000


class Cache:
    """A model and a cache of digests; counts how often one is made."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.model, self.num_made = folder, model, 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.made = whole_digest

        def counted(files: Sequence[Path], passed: Any) -> str:
            self.num_made += 1
            assert self.goes_on.wait(10)
            return self.made(files, passed)

        monkeypatch.setattr(module, "whole_digest", counted)
        monkeypatch.setattr(module, "own_directory", lambda _name: folder)
        monkeypatch.setattr(module, "SETTLED", -1e9)  # no file is older than its last change of anything

    @property
    def file(self) -> Path:
        return self.model / WHOLE_FILE

    def write(self, value: float) -> None:
        save_file({"a": torch.full((64,), value)}, self.file)

    def digest(self) -> str:
        return HostDigest(self.model).result()

    def entries(self) -> list[Path]:
        return sorted(self.folder.iterdir())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    (tmp_path / "cache").mkdir()
    (tmp_path / "model").mkdir()
    found = Cache(tmp_path / "cache", tmp_path / "model", monkeypatch)
    found.write(1.0)
    return found


def test_later_starts_find_it(cache: Cache) -> None:
    first = cache.digest()
    assert (first, cache.num_made) == (whole_digest([cache.file]), 1)
    assert cache.digest() == first
    assert cache.num_made == 1
    assert [each.read_text() for each in cache.entries()] == [first]


def test_a_changed_file_has_another_one_though_its_time_was_set_back(cache: Cache) -> None:
    os.utime(cache.file, (LONG_AGO, LONG_AGO))
    before = cache.digest()
    with cache.file.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(cache.file, (LONG_AGO, LONG_AGO))
    assert cache.digest() != before
    assert cache.num_made == 2


def test_one_that_was_replaced_has_another_one(cache: Cache) -> None:
    before = cache.digest()
    other = cache.file.with_name("other")
    save_file({"a": torch.full((64,), 2.0)}, other)
    other.replace(cache.file)
    assert cache.digest() != before


def test_a_file_that_has_just_changed_is_not_kept(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next change may come within the resolution of its time."""
    monkeypatch.setattr(module, "SETTLED", 60.0)
    assert cache.digest() == cache.digest()
    assert cache.num_made == 2


def test_large_weights_are_waited_for_so_that_they_are_kept(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(module, "SETTLED", 0.05)
    assert cache.digest() == cache.digest()
    assert cache.num_made == 1


def test_what_changes_while_it_is_read_is_refused(cache: Cache) -> None:
    cache.goes_on.clear()
    digest = HostDigest(cache.model)
    cache.write(3.0)
    cache.goes_on.set()
    with pytest.raises(CheckpointError, match="changed while they were read: start again"):
        digest.result()
    assert not any(each.read_bytes() for each in cache.entries())


def test_of_several_at_once_one_makes_it(cache: Cache) -> None:
    cache.goes_on.clear()
    digests = [HostDigest(cache.model) for _ in range(4)]
    cache.goes_on.set()
    assert len({each.result() for each in digests}) == 1
    assert cache.num_made == 1


def test_nobody_waits_for_one_that_hangs(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.digest()
    (entry,) = cache.entries()
    monkeypatch.setattr(module, "LEAST_PATIENCE", 0.05)
    with entry.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cache.digest() == entry.read_text()
    assert cache.num_made == 2


@pytest.mark.parametrize("content", ["", "0" * 31, "0" * 33, "g" * 32, "../../etc/passwd"])
def test_what_is_no_digest_is_made_again(cache: Cache, content: str) -> None:
    right = cache.digest()
    (entry,) = cache.entries()
    entry.write_text(content)
    assert cache.digest() == right
    assert cache.num_made == 2


def test_links_in_the_cache_are_not_followed(cache: Cache, tmp_path: Path) -> None:
    right = cache.digest()
    (entry,) = cache.entries()
    entry.unlink()
    (tmp_path / "elsewhere").write_text("0" * 32)
    entry.symlink_to(tmp_path / "elsewhere")
    assert cache.digest() == right
    assert (tmp_path / "elsewhere").read_text() == "0" * 32


def test_without_a_cache_it_is_made_each_time(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere(_name: str) -> Path:
        raise OSError("there is no place for a cache")

    monkeypatch.setattr(module, "own_directory", nowhere)
    with caplog.at_level("INFO"):
        assert cache.digest() == cache.digest() == whole_digest([cache.file])
    assert cache.num_made == 2
    assert "the digest of the weights is not kept: there is no place for a cache" in caplog.text


def test_the_oldest_are_dropped(cache: Cache) -> None:
    for number in range(MOST_KEPT + 5):
        (cache.folder / f"old{number}").write_text("")
        os.utime(cache.folder / f"old{number}", (LONG_AGO + number, LONG_AGO + number))
    cache.digest()
    left = {each.name for each in cache.entries()}
    assert len(left) == MOST_KEPT
    assert not {f"old{number}" for number in range(5)} & left


def test_a_process_begins_once_for_files_that_stay(cache: Cache) -> None:
    first = host_digest(cache.model)
    assert host_digest(cache.model) is first
    cache.write(5.0)
    assert host_digest(cache.model) is not first
    assert host_digest(cache.model).result() == whole_digest([cache.file])


def test_a_forked_process_begins_again(cache: Cache) -> None:
    """The thread is not there."""
    first = host_digest(cache.model)
    first.pid += 1
    assert host_digest(cache.model) is not first


def test_progress_is_reported_while_it_is_waited_for(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORD_INTERVAL", 0.01)
    cache.goes_on.clear()
    heard: list[str] = []

    def hear(text: str) -> None:
        heard.append(text)
        cache.goes_on.set()

    assert HostDigest(cache.model).result(hear)
    assert heard[0] == "hashing weights: 0.0 of 0.0 GiB"


def test_files_that_cannot_be_read_are_named(cache: Cache) -> None:
    cache.file.write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=f"the weights in {cache.model} cannot be hashed"):
        cache.digest()


def test_times_of_files_are_part_of_their_state(cache: Cache) -> None:
    before = states_of([cache.file])
    os.utime(cache.file, (LONG_AGO, LONG_AGO))
    ((_, inode, size, changed, touched),) = states_of([cache.file])
    assert (before[0][1], before[0][2]) == (inode, size)
    assert changed == LONG_AGO * 10**9
    assert touched > time.time_ns() - 60 * 10**9
