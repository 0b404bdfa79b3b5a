"""A transfer of weights that a trainer has begun, and checks of its parts."""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Sequence
from pathlib import Path

from engine.trainer_group.wire import KINDS, Announced
from engine.weight_versions.assembled import Homes
from engine.weight_versions.contract import WeightsRefused
from router.app.transfer_bodies import UpdateInfo
from router.errors import ApiError

SESSION_TIMEOUT = 600.0
"""Seconds without a call after which a transfer may be given up."""
MOST_PARTS = 10_000
"""Most parts of one transfer."""
SEGMENTS = Path("/dev/shm")
"""Where Linux shows named segments of shared memory."""
SEGMENT = re.compile(r"/?([A-Za-z0-9_][A-Za-z0-9._-]{0,200})")


class WeightTransfer:
    """The transfer that a trainer has begun, and its parts so far."""

    def __init__(self) -> None:
        self._parts: list[Path] | None = None
        self._last_call = 0.0

    def __repr__(self) -> str:
        return f"<WeightTransfer {'none' if self._parts is None else f'{len(self._parts)} parts'}>"

    def begin(self) -> None:
        """Begin a transfer.

        Raises:
            ApiError: another one is under way (409).
        """
        silent = time.monotonic() - self._last_call
        if self._parts is not None and silent < SESSION_TIMEOUT:
            raise ApiError(
                409,
                f"another transfer is under way, last called {silent:.0f} s ago: finish it, or give it up "
                "with /init_weight_transfer_engine",
            )
        self._parts, self._last_call = [], time.monotonic()

    def add(self, part: Path) -> None:
        """Add a part.

        Raises:
            ApiError: no transfer was begun here (409), or it has too many parts (400).
        """
        parts = self._begun()
        if len(parts) == MOST_PARTS:
            raise ApiError(400, f"a transfer has at most {MOST_PARTS} parts")
        parts.append(part)
        self._last_call = time.monotonic()

    def check(self) -> None:
        """Check that a transfer was begun here.

        Raises:
            ApiError: none was (409).
        """
        self._begun()

    def end(self) -> list[Path]:
        """End the transfer; returns its parts.

        Raises:
            ApiError: none was begun here (409), or it has no parts (400).
        """
        parts, self._parts = self._begun(), None
        if not parts:
            raise ApiError(400, "no weights came between /start_weight_update and /finish_weight_update")
        return parts

    def give_up(self) -> None:
        """Forget the transfer, if there is one."""
        self._parts = None

    def _begun(self) -> list[Path]:
        if self._parts is None:
            raise ApiError(409, "no transfer is under way at this router: POST /start_weight_update first")
        return self._parts


def check_announced(tensors: Sequence[Announced], homes: Homes) -> None:
    """Check by the model's files that tensors are its own.

    Raises:
        WeightsRefused: one is unknown, or of another type or shape.
    """
    for each in tensors:
        if each.name not in homes:
            raise WeightsRefused(f"the trainer's {each.name} is no tensor of this model's checkpoint")
        known, kind = homes[each.name][1], KINDS[each.dtype][0]
        if (known.shape, known.kind) != (each.shape, kind):
            raise WeightsRefused(
                f"the trainer's {each.name} is {kind} {list(each.shape)}, "
                f"not {known.kind} {list(known.shape)}"
            )


def part_of(wanted: UpdateInfo) -> Path:
    """The file or directory that an update names."""
    if (wanted.path is None) == (wanted.shared_memory is None):
        raise ApiError(400, "update_info has one of path and shared_memory.", param="update_info")
    if wanted.path is not None:
        if not wanted.path.startswith("/"):
            raise ApiError(400, "path is an absolute path.", param="update_info")
        return Path(wanted.path)
    assert wanted.shared_memory is not None
    found = SEGMENT.fullmatch(wanted.shared_memory)
    if found is None:
        raise ApiError(400, f"{wanted.shared_memory!r} is no name of a segment.", param="update_info")
    return SEGMENTS / found[1]


def write_part(path: Path, text: str) -> None:
    """Write a file of tensors that came in base64.

    Raises:
        ApiError: it is not (400).
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, "a tensor file is not in base64", param="serialized_named_tensors") from error
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(data)
