"""Hostile images, many of each: bounded memory and time, good answers after them."""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from router.errors import ApiError
from router.images.parts import SentImage
from router.images.preparation import ImagePreparation
from tests.engine.vision.tiny_vision_models import make_tiny_chat_model
from tests.router.images.test_decoding import bomb, encoded

Image = pytest.importorskip("PIL.Image")

MOST_PIXELS = 1 << 25
MOST_GROWTH = 200 << 20
NIGHTLY = os.environ.get("LOCKSTEP_NIGHTLY") == "1"
NUM_BOMBS = 200 if NIGHTLY else 40
PATH = "messages[0].content[0]"


def flat(kind: str, mode: str, size: tuple[int, int], **options: object) -> bytes:
    """Pixels that take few bytes."""
    return encoded(Image.new(mode, size), kind, **options)


def animation() -> bytes:
    """Many large frames in a few kilobytes, of which the first is taken."""
    frames = [Image.new("P", (1_000, 1_000), number % 2) for number in range(40)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def png_text_bomb() -> bytes:
    """A PNG whose comment is 64 MiB long once it is unpacked."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    good = flat("PNG", "RGB", (4, 4))
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"\0" * (64 << 20), 9))
    return good[:33] + text + good[33:]


REFUSED = {
    "30,000 x 30,000 pixels": lambda: bomb(30_000),
    "a header that promises all that is allowed": lambda: bomb(5_700),
    "text": lambda: b"GIF is what this is not" * 1_000,
    "no pixels": lambda: bomb(0),
    "truncated": lambda: flat("PNG", "RGB", (2_000, 2_000))[:-300],
    "another format": lambda: flat("TIFF", "RGB", (40, 30)),
    "a long comment": png_text_bomb,
}
TAKEN = {
    "an animation": animation,
    "CMYK": lambda: flat("JPEG", "CMYK", (40, 30)),
    "16 bits": lambda: encoded(Image.new("I;16", (40, 30), 999)),
    "transparent palette": lambda: flat("PNG", "P", (40, 30), transparency=0),
    "as large as may be": lambda: flat("PNG", "RGB", (5_000, 5_000)),
    "a line": lambda: flat("PNG", "RGB", (1, 3_000)),
}


@pytest.fixture
def preparation(tmp_path: Path) -> Iterator[ImagePreparation]:
    found = ImagePreparation(make_tiny_chat_model(tmp_path / "model"), MOST_PIXELS)
    try:
        yield found
    finally:
        found.close()


def refusal(preparation: ImagePreparation, data: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        preparation.prepare(SentImage(data, PATH))
    assert (caught.value.status, caught.value.param) == (400, PATH)
    return str(caught.value)


def resident(preparation: ImagePreparation) -> int:
    """Bytes of this process and of the one that prepares."""
    assert preparation._child is not None
    return sum(psutil.Process(pid).memory_info().rss for pid in (os.getpid(), preparation._child.pid))


def test_bombs_leave_nothing_behind(preparation: ImagePreparation) -> None:
    good = flat("PNG", "RGB", (40, 30))
    first = preparation.prepare(SentImage(good, PATH))
    bombs = {name: make() for name, make in REFUSED.items()}
    for name, data in bombs.items():
        assert refusal(preparation, data), name
    for name, make in TAKEN.items():
        assert preparation.prepare(SentImage(make(), PATH)).tensors, name
    assert preparation._child is not None
    before, process, began = resident(preparation), preparation._child.pid, time.monotonic()
    for number in range(NUM_BOMBS):
        data = [*bombs.values()][number % len(bombs)]
        refusal(preparation, data + number.to_bytes(4, "little"))
    seconds = time.monotonic() - began
    assert resident(preparation) - before < MOST_GROWTH
    assert preparation._child.pid == process, "none of them ended the process"
    assert seconds < 20 * NUM_BOMBS, "each is bounded by itself"
    assert len(preparation._kept) <= 1 + len(TAKEN)
    again = preparation.prepare(SentImage(good + b"\0", PATH))
    assert again.digest == first.digest
    print(f"{NUM_BOMBS} bombs in {seconds:.1f} s")
