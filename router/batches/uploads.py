"""Uploads of files as multipart forms, bounded in size, in time and in number."""

from __future__ import annotations

import asyncio

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.types import Message, Receive

from router.config import HttpConfig
from router.errors import ApiError, refuse

AT_ONCE = 4
"""Uploads that a router receives at once; others wait."""
MOST_FIELDS = 16
BESIDE = 64 * 1024
"""Bytes of a form beside its file."""
READ_BYTES = 1 << 18
PURPOSE = "batch"


class Upload:
    """A received file; read it, then close it."""

    def __init__(self, file: UploadFile, lifetime: float | None) -> None:
        self._file = file
        self.name = file.filename or "file.jsonl"
        self.lifetime = lifetime
        """Seconds that the client wants it kept; None: as others."""

    def __repr__(self) -> str:
        return f"<Upload {self.name}>"

    async def read(self) -> bytes:
        """The next part of the content; empty at its end."""
        return await self._file.read(READ_BYTES)

    async def close(self) -> None:
        await self._file.close()


class Uploads:
    """Receiver of uploads."""

    def __init__(self, config: HttpConfig) -> None:
        self._most = config.batch_max_file_bytes
        self._timeout = config.request_timeout
        self._lets_pages_in = bool(config.allowed_origins)
        self.turns = asyncio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<Uploads of at most {self._most} bytes>"

    async def receive(self, request: Request) -> Upload:
        """The file of a form. Larger parts of it lie in a temporary file.

        Raises:
            ApiError: it is too large (413) or too slow (408), or the form is wrong (400, 415).
        """
        self._check(request)
        bounded = Request(request.scope, self._bounded(request))
        form = await bounded.form(max_files=1, max_fields=MOST_FIELDS)
        try:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                refuse("The form must have a file in the field file.", "file")
            if (purpose := form.get("purpose")) != PURPOSE:
                found = "there is none" if purpose is None else f"got {str(purpose)[:40]!r}"
                refuse(f"purpose must be {PURPOSE}, {found}.", "purpose")
            anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
            return Upload(file, _lifetime(anchor, seconds))
        except BaseException:
            await form.close()
            raise

    def _check(self, request: Request) -> None:
        headers = request.headers
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "multipart/form-data":
            raise ApiError(415, "A file is uploaded as multipart/form-data.", param="Content-Type")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not self._lets_pages_in:
            raise ApiError(403, "Web pages of other origins may not upload files (--allowed-origins).")
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._most + BESIDE:
            raise self._too_large()

    def _bounded(self, request: Request) -> Receive:
        size = 0

        async def receive() -> Message:
            nonlocal size
            try:
                message = await asyncio.wait_for(request.receive(), self._timeout)
            except TimeoutError as error:
                text = f"Nothing of the file came for {self._timeout:g} seconds."
                raise ApiError(408, text, headers={"connection": "close"}) from error
            size += len(message.get("body", b""))
            if size > self._most + BESIDE:
                raise self._too_large()
            return message

        return receive

    def _too_large(self) -> ApiError:
        text = f"A file may have {self._most} bytes (--batch-max-file-bytes)."
        return ApiError(413, text, headers={"connection": "close"})


def _lifetime(anchor: object, seconds: object) -> float | None:
    """Seconds of ``expires_after``, as OpenAI bounds them."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        refuse("expires_after[anchor] must be created_at.", "expires_after[anchor]")
    text = str(seconds)
    if not (text.isascii() and text.isdecimal() and 3600 <= int(text[:9]) <= 2_592_000):
        refuse("expires_after[seconds] must be a number from 3600 to 2592000.", "expires_after[seconds]")
    return float(text)
