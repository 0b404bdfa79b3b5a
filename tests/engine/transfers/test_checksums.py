"""Checksums: zlib's values at every length and place, by each kind of instructions."""

from __future__ import annotations

import os
import random
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.transfers import checksums
from engine.transfers.block_memory import BlockMemory
from engine.transfers.checksums import NARROW, TABLE, WIDE, ChecksumLibrary, read_checked, spans_of
from parallel import compiler

KINDS = {"table": TABLE, "narrow": NARROW, "wide": WIDE}
PIECE = 256 << 10
"""Bytes that are read and checked at once."""


def made(kind: str) -> ChecksumLibrary:
    if checksums.load() is None:
        pytest.skip("there is no compiler, or this CPU does not multiply without carries")
    library = ChecksumLibrary(checksums.SOURCE.open(), KINDS[kind])
    if library.kind > library.best_kind:
        pytest.skip(f"this CPU has no instructions for {kind}")
    return library


@pytest.fixture(params=["zlib", "table", "narrow", "wide"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Computes checksums that way meanwhile."""
    library = None if request.param == "zlib" else made(request.param)
    monkeypatch.setattr(checksums, "_loaded", library)
    return request.param


@pytest.mark.parametrize("name", list(KINDS))
def test_values_are_those_of_zlib_at_every_length_and_place(name: str) -> None:
    library, content = made(name), random.Random(1).randbytes(3000)
    whole = spans_of([content])
    for size in [*range(1100), 2047, 2048, 2049, 2900]:
        for begin in (0, 1, 15, 63 - size % 7):
            span = np.array([[whole[0, 0] + begin, size]], dtype=np.int64)
            assert library.crc32(span) == zlib.crc32(content[begin : begin + size]), (begin, size)


@pytest.mark.parametrize("name", list(KINDS))
def test_a_message_goes_on_from_what_came_before(name: str) -> None:
    library, chance = made(name), random.Random(2)
    for _ in range(300):
        parts = [chance.randbytes(chance.choice((0, 1, 16, 63, 64, 300, 1000))) for _ in range(4)]
        expected = zlib.crc32(b"".join(parts))
        assert library.crc32(spans_of(parts)) == expected
        assert library.crc32(spans_of(parts[1:]), zlib.crc32(parts[0])) == expected


def test_buffers_of_every_type(kind: str) -> None:
    content = random.Random(3).randbytes(5000)
    for parts in ([content], [bytearray(content[:77]), memoryview(content)[77:]], [b"", content, b""], []):
        assert checksums.crc32(parts) == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize(
    "sizes",
    [[10], [0, 10, 0], [1] * 1500, [PIECE], [PIECE - 1, 2], [PIECE + 1, 7], [38_208] * 48, [3 * PIECE + 5]],
    ids=lambda sizes: f"{len(sizes)}-{sum(sizes)}",
)
def test_a_file_is_read_and_checked(kind: str, tmp_path: Path, sizes: list[int]) -> None:
    content, offset = np.random.default_rng(4).bytes(sum(sizes)), 33
    (path := tmp_path / "file").write_bytes(bytes(offset) + content + b"and more")
    parts = [memoryview(bytearray(size)) for size in sizes]
    with path.open("rb") as file:
        assert read_checked(file.fileno(), offset, parts) == (len(content), zlib.crc32(content))
        assert file.tell() == 0, "nobody's place in the file moves"
    assert b"".join(parts) == content


def test_a_file_that_ends_early_tells_how_much_there_was(kind: str, tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(bytes(100))
    for sizes in ([60, 60], [101], [10] * 600):
        parts = [memoryview(bytearray(size)) for size in sizes]
        with path.open("rb") as file:
            assert read_checked(file.fileno(), 0, parts)[0] == 100


def test_what_cannot_be_read_says_why(kind: str, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            read_checked(folder, 0, [memoryview(bytearray(10))])
    finally:
        os.close(folder)


def test_spans_of_a_cache_are_where_its_blocks_are() -> None:
    parts = [np.arange(start, start + 60, dtype=np.uint8).reshape(6, 10)[:, :8] for start in (0, 100)]
    memory = BlockMemory(parts)
    for block in range(6):
        found = memory.parts_of(block)
        assert spans_of(found) is found.spans
        assert found.spans.tolist() == spans_of(list(found)).tolist()


@pytest.mark.parametrize("trouble", ["CPU", "compiler"])
def test_without_the_library_zlib_computes(
    trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checksums, "_loaded", None)
    if trouble == "CPU":
        monkeypatch.setattr(compiler, "cpu_flags", lambda: frozenset({"sse4_1"}))
    else:
        monkeypatch.setattr(compiler, "cpu_flags", lambda: checksums.SOURCE.needs)

        def fails(*_given: object) -> Path:
            raise subprocess.CalledProcessError(1, "g++", stderr=b"error: no such option")

        monkeypatch.setattr(compiler, "compiled", fails)
    with caplog.at_level("INFO"):
        assert checksums.load.__wrapped__() is None
    assert (
        f"checksums by zlib: {'this CPU lacks pclmulqdq' if trouble == 'CPU' else 'the compiler'}"
        in caplog.text
    )
    assert checksums.crc32([b"abc"]) == zlib.crc32(b"abc")
