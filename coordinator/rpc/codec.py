"""Messages as bytes: msgspec structs of a tagged union, as msgpack after a version byte.

The byte is the protocol version. Decoding is strict, and nothing else is ever decoded: no pickle, no dynamic
method names. :mod:`coordinator.rpc.rpc` sends and receives the frames.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

PROTOCOL = 12
"""Protocol version; rises with every message change that older peers would misread."""

In = TypeVar("In")


class Malformed(ValueError):
    """Error: received bytes are no valid message."""


class OtherProtocol(Malformed):
    """Error: a message has another protocol version than this process."""

    def __init__(self, version: int) -> None:
        super().__init__(f"protocol version {version}, ours is {PROTOCOL}")
        self.version = version


_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """Encode a message struct as one frame."""
    buffer = bytearray(1)
    buffer[0] = PROTOCOL
    _encoder.encode_into(message, buffer, 1)
    return bytes(buffer)


class Decoder(Generic[In]):
    """Turns frames into the structs of one union."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(union)

    def decode(self, frame: bytes | memoryview) -> In:
        """Decode and validate the message in a frame.

        Raises:
            Malformed: it is none.
        """
        if not frame:
            raise Malformed("empty frame")
        if frame[0] != PROTOCOL:
            raise OtherProtocol(frame[0])
        try:
            return self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise Malformed(str(error)) from error
