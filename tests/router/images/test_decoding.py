"""Pixels of sent images: formats, colours and bounds."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import pytest

Image = pytest.importorskip("PIL.Image")

from router.images.decoding import BadImage, decode  # noqa: E402

MOST = 1 << 20


def encoded(image: Any, kind: str = "PNG", **options: object) -> bytes:
    into = io.BytesIO()
    image.save(into, kind, **options)
    return into.getvalue()


def test_formats_give_the_same_colours() -> None:
    image = Image.new("RGB", (8, 6), (200, 30, 90))
    for kind in ("PNG", "WEBP", "GIF"):
        found = decode(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})), MOST)
        assert (found.mode, found.size, found.getpixel((3, 3))) == ("RGB", (8, 6), (200, 30, 90)), kind
    assert decode(encoded(image, "JPEG"), MOST).size == (8, 6)


def test_what_is_transparent_is_white() -> None:
    assert decode(encoded(Image.new("RGBA", (2, 2), (9, 9, 9, 0))), MOST).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([1, 2, 3] * 256)
    data = encoded(palette, transparency=0)
    assert decode(data, MOST).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_keep_their_upper_half() -> None:
    found = decode(encoded(Image.new("I;16", (2, 2), 0x8034)), MOST)
    assert found.getpixel((0, 0)) == (128, 128, 128)


def test_printers_colours_become_those_of_a_screen() -> None:
    found = decode(encoded(Image.new("CMYK", (2, 2), (0, 255, 255, 0)), "JPEG"), MOST).getpixel((0, 0))
    assert found[0] > 200 > 60 > max(found[1:])


def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue", "lime")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data, MOST).getpixel((0, 0)) == (255, 0, 0)


def test_a_camera_that_was_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(Image.new("RGB", (8, 4)), "JPEG", exif=exif), MOST).size == (4, 8)


def bomb(side: int) -> bytes:
    """A PNG of a few hundred bytes whose header promises side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"plain text, and named .png", "is in none of the formats"),
        (b"", "is in none of the formats"),
        (bomb(30_000), "more than the 1048576 pixels allowed"),
        (bomb(0), "is in none of the formats|cannot be decoded"),
        (bomb(1_200), "has 1200 x 1200 pixels, more than the 1048576 allowed"),
        (bomb(900), "cannot be decoded"),
        (encoded(Image.effect_noise((64, 64), 50))[:-200], "cannot be decoded"),
        (encoded(Image.new("RGB", (2, 2)), "BMP"), "is in none of the formats"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, problem: str) -> None:
    with pytest.raises(BadImage, match=problem):
        decode(data, MOST)
