"""Messages between a router and its process that prepares images."""

from __future__ import annotations

import msgspec

from engine.prompt_images import ImageTensor

LENGTH_BYTES = 4
"""Bytes of the length in front of each message."""


class ProcessorRead(msgspec.Struct, frozen=True, tag="read"):
    """First message of the process: it has read the model's processor."""

    mark: str
    """Text that chat templates write for an image."""
    placeholder: str
    """Text of the token that stands for one of its rows."""
    packages: str
    """What decides the pixels beside the model's files: versions, and the back end."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The image cannot be taken, in words for the client."""

    problem: str


class NoProcessor(msgspec.Struct, frozen=True, tag="none"):
    """The processor cannot be used at all."""

    problem: str


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """An image as a model takes it."""

    text: str
    """What the prompt has for it: a placeholder for each row, and marks between."""
    tensors: tuple[ImageTensor, ...]
    digest: bytes
    """Name of all this."""
    beside_others: Prepared | None = None
    """The same image where a request has several; None: as it is here."""


FromPreparer = ProcessorRead | Prepared | Refused | NoProcessor
