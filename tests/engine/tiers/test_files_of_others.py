"""Files that others made or can change: they are neither believed nor deleted."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.rpc import keys
from engine.tiers.block_files import MARK, BlockFiles, WrongBlock, file_bytes
from parallel.links.keys import LinkKey
from tests.engine.tiers.test_block_files import FOLDER, NAMES, SIZES, make, parts

IS_ROOT = os.geteuid() == 0
SOMEBODY = 54_321
"""A user id that is nobody's here."""
LEVELS = ["file", "part", "cache", "model", "directory"]
KEYS = [keys.file_key(keys.generate()) for _ in range(2)]


@pytest.fixture(params=["disk", "tmpfs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory of this user, on a disk and in memory."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm here")
    made = Path("/dev/shm") / f"lockstep-test-{os.getpid()}"
    made.mkdir(mode=0o700)
    yield made
    shutil.rmtree(made)


def at(files: BlockFiles, level: str) -> Path:
    """The file of a block, or one of the folders above it."""
    path = files.path(NAMES[1])
    return [path, *path.parents][LEVELS.index(level)]


def is_believed(files: BlockFiles) -> bool:
    found = parts()
    try:
        files.read(NAMES[1], found)
    except OSError:
        return False
    return found == parts(5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_what_others_may_write_is_not_believed(root: Path, level: str, bits: int) -> None:
    files = make(root / "kv")
    files.write(NAMES[1], parts(5))
    assert is_believed(files)
    path = at(files, level)
    mode = path.stat().st_mode & 0o777
    path.chmod(mode | bits)
    assert not is_believed(files)
    if level in LEVELS[2:]:
        with pytest.raises(PermissionError, match=r"can be changed by others .* chmod go-w"):
            make(root / "kv")
    path.chmod(mode)
    assert is_believed(files)


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
@pytest.mark.parametrize("level", LEVELS)
def test_what_belongs_to_another_user_is_not_believed(root: Path, level: str) -> None:
    files = make(root / "kv")
    files.write(NAMES[1], parts(5))
    os.chown(at(files, level), SOMEBODY, SOMEBODY)
    assert not is_believed(files)
    if level in LEVELS[2:]:
        with pytest.raises(PermissionError, match=f"user {SOMEBODY}"):
            make(root / "kv")


@pytest.mark.skipif(IS_ROOT, reason="what belongs to root is believed")
def test_a_directory_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make(tmp_path / "kv")
    files.write(NAMES[1], parts(5))
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert not is_believed(files)
    with pytest.raises(PermissionError, match="can be changed by others"):
        make(tmp_path / "kv")


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_links_are_not_followed(root: Path, level: str) -> None:
    files = make(root / "kv")
    files.write(NAMES[1], parts(5))
    path = at(files, level)
    elsewhere = root / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert not is_believed(files)
    files.drop(NAMES[1])
    assert elsewhere.exists()
    if level == "file":
        assert files.names() == set()
    else:
        assert len(list(elsewhere.rglob("*.kv"))) == 1
        with pytest.raises(OSError, match=r"Not a directory|levels of symbolic links"):
            files.write(NAMES[1], parts(6))


def test_the_directory_itself_may_be_a_link(root: Path) -> None:
    (root / "here").mkdir(mode=0o700)
    (root / "kv").symlink_to("here")
    files = make(root / "kv")
    files.write(NAMES[1], parts(5))
    assert is_believed(files)
    assert files.names() == {NAMES[1]}


@pytest.mark.skipif(not IS_ROOT, reason="only root can make devices")
def test_a_device_is_not_opened(tmp_path: Path) -> None:
    files = make(tmp_path)
    files.write(NAMES[1], parts(5))
    path = files.path(NAMES[1])
    path.unlink()
    try:
        os.mknod(path, 0o020600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("devices cannot be made here")
    with pytest.raises(PermissionError, match="is no regular file"):
        files.read(NAMES[1], parts())
    assert files.names() == set()


def test_a_file_of_another_is_replaced_once_the_block_is_computed(root: Path) -> None:
    files = make(root)
    files.write(NAMES[1], parts(5))
    files.path(NAMES[1]).chmod(0o666)
    assert not is_believed(files)
    files.write(NAMES[1], parts(5))
    assert is_believed(files)


# ---- deleting


def foreign(root: Path, files: BlockFiles) -> list[Path]:
    """Files that were not made here, some behind links, with names like those that are."""
    outside = root / "outside"
    block, unfinished = f"{NAMES[7].hex()}.kv", f".{NAMES[7].hex()}-{'0' * 12}.tmp"
    own = files.path(NAMES[1]).parent
    found = [
        root / "kv/projects/2026/notes/meeting.kv",
        root / "kv/projects/2026/07" / block,  # a block's name, in a folder without a mark
        outside / "a/b" / unfinished,
        outside / "07" / block,
        own / "draft.kv",
        own / "draft.tmp",
        own.parent / "letters/a.tmp",
        own.parent / block,
    ]
    for path in found:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (1.0, 1.0))
    (root / "kv/linked").symlink_to(outside)
    (root / "kv/projects/linked").symlink_to(outside)
    (own.parent / "07").symlink_to(outside / "07")
    (own.parent.parent / "linked").symlink_to(outside)
    (outside / MARK).touch()
    (outside / "a" / MARK).touch()
    return found


def test_what_was_not_made_here_is_not_deleted(root: Path) -> None:
    files = make(root / "kv")
    files.write(NAMES[1], parts(5))
    left = foreign(root, files)
    assert files.trim(0)[0] == 1, "its own file goes"
    files.write(NAMES[1], parts(5))
    assert files.clear() == 1
    assert [path for path in left if not path.exists()] == []
    assert not list(root.rglob(f"{NAMES[1].hex()}*"))
    for path in left:
        assert path.read_bytes() == bytes(1000)


def test_foreign_files_do_not_count_as_the_caches_own(root: Path) -> None:
    files = make(root / "kv")
    files.write(NAMES[1], parts(5))
    foreign(root, files)
    assert files.trim(1 << 30) == (0, file_bytes(sum(SIZES)))
    assert [path.path for path in files.all_files()] == [f"{FOLDER}/01/{NAMES[1].hex()}.kv"]


def test_a_folder_with_foreign_files_is_neither_marked_nor_used(root: Path) -> None:
    theirs = root / FOLDER / "01" / f"{NAMES[1].hex()}.kv"
    theirs.parent.mkdir(parents=True, mode=0o700)
    for path in (root / FOLDER, (root / FOLDER).parent):
        path.chmod(0o700)
    theirs.write_bytes(bytes(1000))
    with pytest.raises(PermissionError, match=f"has files but no {MARK}"):
        make(root)
    files = BlockFiles(root, FOLDER, "def")
    assert files.trim(0) == (0, 0)
    assert files.clear() == 0
    assert theirs.exists()


def test_what_a_killed_instance_left_unfinished_is_deleted(root: Path) -> None:
    files = make(root)
    files.write(NAMES[1], parts(5))
    left = files.path(NAMES[1]).with_name(f".{NAMES[1].hex()}-{'a' * 12}.tmp")
    left.write_bytes(bytes(1000))
    os.utime(left, (1.0, 1.0))
    assert files.trim(1000) == (1, file_bytes(sum(SIZES)))
    assert not left.exists()
    assert files.names() == {NAMES[1]}


def test_a_folder_that_was_deleted_is_made_again_with_its_mark(root: Path) -> None:
    files = make(root / "kv")
    shutil.rmtree(root / "kv")
    files.write(NAMES[1], parts(5))
    assert is_believed(files)
    assert files.trim(0)[0] == 1


@pytest.mark.skipif(not IS_ROOT, reason="only root can mount")
def test_a_small_disk_that_is_full_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(tmp_path / "kv"), b"tmpfs", 0, b"size=64k,mode=700"):
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        files = BlockFiles(tmp_path / "kv", FOLDER, "def")
        files.prepare()
        block = [memoryview(bytes(10_000))]
        written = 0
        while shutil.disk_usage(tmp_path / "kv").free > 12_288:
            files.write(NAMES[written], block)
            written += 1
        with pytest.raises(OSError, match="No space left"):
            files.write(NAMES[written], block)
        assert 0 < len(files.names()) == written
        assert not list(tmp_path.rglob("*.tmp"))
        assert files.clear() == written
        files.write(NAMES[0], block)
    finally:
        libc.umount2(bytes(tmp_path / "kv"), 2)


# ---- keys


def of_mesh(root: Path, key: LinkKey | None) -> BlockFiles:
    files = BlockFiles(root, FOLDER, "def", key)
    files.prepare()
    return files


def test_a_mesh_that_starts_again_with_its_key_finds_its_blocks(root: Path) -> None:
    of_mesh(root, KEYS[0]).write(NAMES[1], parts(5))
    again = of_mesh(root, LinkKey(KEYS[0].secret))
    assert again.names() == {NAMES[1]}
    assert is_believed(again)
    assert KEYS[0].secret.hex() not in str(again.folder)


@pytest.mark.parametrize(("writer", "reader"), [KEYS, (None, KEYS[0]), (KEYS[0], None)])
def test_blocks_of_a_mesh_with_another_key_are_neither_found_nor_believed(
    root: Path, writer: LinkKey | None, reader: LinkKey | None
) -> None:
    one, other = of_mesh(root, writer), of_mesh(root, reader)
    one.write(NAMES[1], parts(5))
    assert other.names() == set()
    moved = other.path(NAMES[1])
    moved.parent.mkdir(mode=0o700)
    one.path(NAMES[1]).rename(moved)
    with pytest.raises(WrongBlock, match="another digest"):
        other.read(NAMES[1], parts())


def test_bytes_with_the_same_crc_are_found_where_there_is_a_key(root: Path) -> None:
    for key in (KEYS[0], None):
        files = of_mesh(root, key)
        files.write(NAMES[1], parts(0))
        path = files.path(NAMES[1])
        data = bytearray(path.read_bytes())
        for place, byte in enumerate((0xEDB88320 << 1 | 1).to_bytes(5, "little"), 40):
            data[place] ^= byte  # the 33 bits of the polynomial, so the CRC stays
        path.write_bytes(data)
        if key is None:
            files.read(NAMES[1], parts())
        else:
            with pytest.raises(WrongBlock):
                files.read(NAMES[1], parts())
