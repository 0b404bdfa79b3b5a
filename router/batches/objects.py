"""Files and batches as OpenAI's clients know them (pure)."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Literal

import msgspec

from router.errors import refuse

UNITS = {"m": 60, "h": 3600, "d": 86400}
MOST_WINDOW = 30 * 86400
"""Longest ``completion_window``, in seconds."""
MOST_ERRORS = 100
"""Wrong lines that a batch names."""


class BatchState(StrEnum):
    """Status of a batch."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to the batch."""
        return self in (self.FAILED, self.COMPLETED, self.EXPIRED, self.CANCELLED)


class FileObject(msgspec.Struct, frozen=True):
    """An uploaded file, or one that a batch has written."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class WrongLine(msgspec.Struct):
    """Reason why the file of a batch cannot be used."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class WrongLines(msgspec.Struct):
    """List of reasons, in OpenAI's form."""

    data: list[WrongLine]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch, in OpenAI's form."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: WrongLines | None = None
    input_file_id: str
    completion_window: str
    status: BatchState = BatchState.VALIDATING
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class BatchRequest(msgspec.Struct):
    """Body of ``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Any = None


def seconds_of(window: str) -> int:
    """Seconds of a ``completion_window``, such as 24h.

    Raises:
        ApiError: it is none (400).
    """
    found = re.fullmatch(r"(\d{1,5})([mhd])", window, re.ASCII)
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not 0 < seconds <= MOST_WINDOW:
        refuse(
            f"completion_window must be a time like 24h, of at most 30d, got {window[:20]!r}.",
            "completion_window",
        )
    return seconds
