"""Frames on a stream: four bytes of length (big-endian), then as many of content (pure)."""

from __future__ import annotations

from collections.abc import Iterator

LENGTH_BYTES = 4
LARGEST_FRAME = 4 << 20
"""Maximum frame content in bytes; a peer that announces more is disconnected."""


class FrameTooLarge(ValueError):
    """Error: a peer announced a frame longer than :data:`LARGEST_FRAME`."""


class Frames:
    """Incremental parser of frames from a byte stream."""

    def __init__(self) -> None:
        self._held = bytearray()

    def take_in(self, content: bytes) -> Iterator[bytes]:
        """Add received bytes; returns the frames now complete, and keeps the rest.

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
    """Encode content as a frame.

    Raises:
        FrameTooLarge: the other side would not take it.
    """
    if len(content) > LARGEST_FRAME:
        raise FrameTooLarge(f"{len(content)} bytes are too many for a frame: {LARGEST_FRAME} are allowed")
    return len(content).to_bytes(LENGTH_BYTES, "big") + content
