"""Frames on a stream: four bytes of length (big-endian), then as many of content (pure)."""

from __future__ import annotations

from collections.abc import Iterator

LENGTH_BYTES = 4
LARGEST_FRAME = 4 << 20
"""Bytes of content; who announces more is cut off before more is kept."""


class FrameTooLarge(ValueError):
    """A length beyond :data:`LARGEST_FRAME`."""


class Frames:
    """Cuts what comes on a stream into frames."""

    def __init__(self) -> None:
        self._held = bytearray()

    def take_in(self, content: bytes) -> Iterator[bytes]:
        """The frames that are whole with these bytes; the rest is kept.

        Raises:
            FrameTooLarge: the stream cannot be read any further.
        """
        self._held += content
        while len(self._held) >= LENGTH_BYTES:
            length = int.from_bytes(self._held[:LENGTH_BYTES], "big")
            if length > LARGEST_FRAME:
                raise FrameTooLarge(f"a frame of {length} bytes is announced, {LARGEST_FRAME} are allowed")
            end = LENGTH_BYTES + length
            if len(self._held) < end:
                return
            frame = bytes(self._held[LENGTH_BYTES:end])
            del self._held[:end]
            yield frame


def framed(content: bytes) -> bytes:
    """A frame with this content.

    Raises:
        FrameTooLarge: the other side would not take it.
    """
    if len(content) > LARGEST_FRAME:
        raise FrameTooLarge(f"{len(content)} bytes are too many for a frame: {LARGEST_FRAME} are allowed")
    return len(content).to_bytes(LENGTH_BYTES, "big") + content
