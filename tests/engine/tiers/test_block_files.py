"""Files of blocks: what is whole, torn, changed, of others, or too much."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.tiers.block_files import (
    HEADER,
    KEPT,
    MARK,
    BlockFile,
    BlockFiles,
    WrongBlock,
    file_bytes,
    files_to_drop,
    folder_of,
)
from engine.transfers import checksums

NAMES = [bytes([number]) * 16 for number in range(20)]
FOLDER = folder_of("org/model 7B", "abc", "def")
SIZES = 100, 30, 7


def make(root: Path, folder: str = FOLDER, identity: str = "def") -> BlockFiles:
    files = BlockFiles(root, folder, identity)
    files.prepare()
    return files


def parts(fill: int = 0) -> list[memoryview]:
    return [memoryview(bytearray([fill]) * size) for size in SIZES]


def test_a_block_comes_back_as_it_was(tmp_path: Path) -> None:
    files = make(tmp_path)
    files.write(NAMES[1], parts(5))
    found = parts()
    os.utime(files.path(NAMES[1]), (1.0, 1.0))
    files.read(NAMES[1], found)
    assert found == parts(5)
    assert files.path(NAMES[1]).stat().st_mtime > 1e9, "it counts as used now"
    assert files.path(NAMES[1]).relative_to(tmp_path).parts[:2] == ("org-model-7B", "abc-def")
    assert files.names() == make(tmp_path).names() == {NAMES[1]}
    assert [each.name for each in tmp_path.rglob("*.tmp")] == []


def test_a_block_of_more_parts_than_one_call_takes(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, FOLDER, "def")
    files.write(NAMES[0], [memoryview(bytearray([number % 251] * 3)) for number in range(1500)])
    found = [memoryview(bytearray(3)) for _ in range(1500)]
    files.read(NAMES[0], found)
    assert [each[1] for each in found] == [number % 251 for number in range(1500)]


@pytest.fixture(params=["zlib", "library"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are checked by zlib, then by the compiled checksums where there are some."""
    library = None if request.param == "zlib" else checksums.load()
    if library is None and request.param == "library":
        pytest.skip("there is no compiler, or this CPU does not multiply without carries")
    monkeypatch.setattr(checksums, "_loaded", library)


@pytest.mark.parametrize("writer", ["zlib", "library"])
def test_files_fit_each_way_of_checking(
    way: None, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = BlockFiles(tmp_path, FOLDER, "def")
    content = [memoryview(os.urandom(5000)) for _ in range(48)]
    with monkeypatch.context() as written:
        written.setattr(checksums, "_loaded", None if writer == "zlib" else checksums.load())
        files.write(NAMES[0], content)
    found = [memoryview(bytearray(5000)) for _ in range(48)]
    files.read(NAMES[0], found)
    assert found == content
    whole = files.path(NAMES[0]).read_bytes()
    for position in range(HEADER.size, len(whole), 3331):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        files.path(NAMES[0]).write_bytes(changed)
        with pytest.raises(WrongBlock):
            files.read(NAMES[0], found)


def test_every_flipped_bit_is_found(way: None, tmp_path: Path) -> None:
    files = make(tmp_path)
    files.write(NAMES[0], parts(9))
    path = files.path(NAMES[0])
    whole = path.read_bytes()
    assert len(whole) == HEADER.size + sum(SIZES) == file_bytes(sum(SIZES))
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(WrongBlock):
            files.read(NAMES[0], parts())


@pytest.mark.parametrize("size", [0, 5, HEADER.size, 100, HEADER.size + sum(SIZES) - 1, 500])
def test_a_torn_file_is_found(tmp_path: Path, size: int) -> None:
    files = make(tmp_path)
    files.write(NAMES[0], parts(9))
    path = files.path(NAMES[0])
    path.write_bytes((path.read_bytes() + bytes(500))[:size])
    with pytest.raises(WrongBlock):
        files.read(NAMES[0], parts())


def test_the_file_of_another_block_or_cache_is_found(tmp_path: Path) -> None:
    files, other = make(tmp_path), make(tmp_path, folder_of("other", "abc", "xyz"), "xyz")
    files.write(NAMES[0], parts(9))
    files.path(NAMES[1]).parent.mkdir()
    files.path(NAMES[1]).write_bytes(files.path(NAMES[0]).read_bytes())
    with pytest.raises(WrongBlock):
        files.read(NAMES[1], parts())
    assert other.names() == set()
    with pytest.raises(FileNotFoundError):
        other.read(NAMES[0], parts())
    other.path(NAMES[0]).parent.mkdir()
    other.path(NAMES[0]).write_bytes(files.path(NAMES[0]).read_bytes())
    with pytest.raises(WrongBlock):
        other.read(NAMES[0], parts())


def test_nothing_is_left_of_a_block_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make(tmp_path)
    written: list[int] = []

    def full(descriptor: int, some: list[memoryview]) -> int:
        written.append(len(some))
        if len(written) > 1:
            raise OSError(28, "No space left on device")
        return os.write(descriptor, some[0][:10])

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(NAMES[0], parts(1))
    assert len(written) == 2
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [MARK]


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make(tmp_path)
    monkeypatch.setattr(os, "writev", lambda descriptor, some: os.write(descriptor, some[0][:13]))
    files.write(NAMES[0], parts(3))
    found = parts()
    files.read(NAMES[0], found)
    assert found == parts(3)


def test_files_that_were_not_used_for_longest_are_dropped() -> None:
    files = [BlockFile(str(number), 10, float(number)) for number in (5, 3, 8, 1, 2)]
    assert files_to_drop(files, 50) == []
    assert [each.path for each in files_to_drop(files, 40)] == ["1", "2"]  # 36 stay at most
    assert len(files_to_drop(files, 0)) == 5
    assert 40 * KEPT >= 30


def test_a_directory_is_trimmed_over_all_caches_and_nothing_else_is_touched(tmp_path: Path) -> None:
    files, other = make(tmp_path), make(tmp_path, folder_of("other", "abc", "xyz"), "xyz")
    for number in range(4):
        files.write(NAMES[number], parts(number))
        other.write(NAMES[number], parts(number))
        os.utime(files.path(NAMES[number]), (number, number))
    for path in (tmp_path / "notes.txt", files.path(NAMES[0]).with_name("README.md")):
        path.write_bytes(bytes(1000))
    dropped, left = files.trim(6 * file_bytes(sum(SIZES)))
    assert (dropped, left) == (3, 5 * file_bytes(sum(SIZES)))
    assert files.names() == {NAMES[3]}
    assert other.names() == set(NAMES[:4])
    assert files.clear() == 1
    assert files.names() == set()
    assert other.names() == set(NAMES[:4])
    assert len([path for path in tmp_path.rglob("*.*") if path.name != MARK]) == 4 + 2


def test_names_of_others_files_are_passed_over(tmp_path: Path) -> None:
    files = make(tmp_path)
    files.write(NAMES[3], parts())
    folder = files.path(NAMES[3]).parent
    for name in ("x.kv", f"{'g' * 32}.kv", f"{'0' * 31}.kv", NAMES[4].hex()):
        (folder / name).write_bytes(b"")
    (folder.parent / "file").write_bytes(b"")
    assert files.names() == {NAMES[3]}


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="Not a directory"):
        make(tmp_path / "file")
