"""Endpoints of files and batches, as OpenAI has them."""

from __future__ import annotations

import time
import uuid

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from router.api.answers import encode, json_response
from router.batches.batch_runs import BatchRuns
from router.batches.batch_store import TooManyBatches
from router.batches.file_store import FileInUse, FileWriter
from router.batches.lines import ENDPOINTS
from router.batches.objects import (
    BatchObject,
    BatchRequest,
    BatchState,
    FileObject,
    seconds_of,
)
from router.batches.uploads import PURPOSE, Upload, Uploads
from router.config import HttpConfig
from router.errors import ApiError, refuse
from router.http.body import decoder, read_body
from router.stored.listing import DeletedObject, check_metadata, page_of
from router.stored.runs import tenant_of

MOST_FILES = 10_000
"""Files of one page."""

_read_request = decoder(BatchRequest)


class FileEndpoints:
    """Handlers of /v1/files."""

    def __init__(self, runs: BatchRuns, config: HttpConfig) -> None:
        self._files = runs.files
        self._ttl = config.store_ttl
        self._uploads = Uploads(config)

    def __repr__(self) -> str:
        return f"<FileEndpoints of {self._files!r}>"

    async def upload(self, request: Request) -> Response:
        """``POST /v1/files``."""
        async with self._uploads.turns:
            upload = await self._uploads.receive(request)
            try:
                return json_response(encode(await self._kept(upload, tenant_of(request))))
            finally:
                await upload.close()

    async def _kept(self, upload: Upload, tenant: str) -> FileObject:
        id = await self._files.begin(tenant, upload.name, PURPOSE)
        try:
            writer = FileWriter(self._files, id)
            while data := await upload.read():
                await writer.write(data)
            await writer.end(time.time() + min(upload.lifetime or self._ttl, self._ttl))
        except BaseException:
            await self._files.delete(id)
            raise
        found = await self._files.get(id, tenant)
        assert found is not None
        return found

    async def list(self, request: Request) -> Response:
        """``GET /v1/files``."""
        found = await self._files.all(tenant_of(request), request.query_params.get("purpose"))
        page = page_of(request.query_params, found, what="your files", most=MOST_FILES, shown=MOST_FILES)
        return json_response(encode(page))

    async def get(self, request: Request) -> Response:
        """``GET /v1/files/{id}``."""
        return json_response(encode(await self._found(request)))

    async def content(self, request: Request) -> Response:
        """``GET /v1/files/{id}/content``."""
        file = await self._found(request)
        headers = {"content-length": str(file.bytes)}
        return StreamingResponse(
            self._files.parts(file.id), headers=headers, media_type="application/octet-stream"
        )

    async def delete(self, request: Request) -> Response:
        """``DELETE /v1/files/{id}``."""
        file = await self._found(request)
        try:
            await self._files.delete(file.id)
        except FileInUse as error:
            raise ApiError(409, str(error), headers={"x-should-retry": "false"}) from error
        return json_response(encode(DeletedObject(file.id, "file")))

    async def _found(self, request: Request) -> FileObject:
        found = await self._files.get(request.path_params["id"], tenant_of(request))
        if found is None:
            raise ApiError(404, "There is no file of this id: it has expired, was deleted, or never was.")
        return found


class BatchEndpoints:
    """Handlers of /v1/batches."""

    def __init__(self, runs: BatchRuns, config: HttpConfig) -> None:
        self._runs = runs
        self._batches = runs.batches
        self._config = config

    def __repr__(self) -> str:
        return f"<BatchEndpoints of {self._runs!r}>"

    async def create(self, request: Request) -> Response:
        """``POST /v1/batches``."""
        asked = _read_request(await read_body(request, self._config))
        tenant, now = tenant_of(request), int(time.time())
        if asked.endpoint not in ENDPOINTS:
            refuse(f"endpoint must be one of {', '.join(ENDPOINTS)}.", "endpoint")
        if asked.output_expires_after is not None:
            refuse("output_expires_after is not supported (--store-ttl).", "output_expires_after")
        check_metadata(asked.metadata)
        window = seconds_of(asked.completion_window)
        file = await self._runs.files.get(asked.input_file_id, tenant)
        if file is None or file.purpose != PURPOSE:
            refuse("input_file_id must be the id of a file that was uploaded for batches.", "input_file_id")
        batch = BatchObject(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + window,
            metadata=asked.metadata,
        )
        try:
            await self._runs.begin(tenant, batch)
        except TooManyBatches as error:
            text = "Too many of your batches have not ended: wait for one, or cancel it."
            raise ApiError(429, text, headers={"retry-after": "60"}) from error
        return json_response(encode(batch))

    async def list(self, request: Request) -> Response:
        """``GET /v1/batches``."""
        found = await self._batches.all(tenant_of(request))
        return json_response(encode(page_of(request.query_params, found[::-1], what="your batches")))

    async def get(self, request: Request) -> Response:
        """``GET /v1/batches/{id}``."""
        return json_response(encode(await self._found(request)))

    async def cancel(self, request: Request) -> Response:
        """``POST /v1/batches/{id}/cancel``; again, it changes nothing."""
        batch = await self._found(request)

        def cancel(each: BatchObject) -> None:
            if each.status in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
                each.status, each.cancelling_at = BatchState.CANCELLING, int(time.time())

        await self._batches.change(batch.id, cancel)
        batch = await self._found(request)
        if batch.status not in (BatchState.CANCELLING, BatchState.CANCELLED):
            refuse(f"A batch that is {batch.status} cannot be cancelled.")
        return json_response(encode(batch))

    async def _found(self, request: Request) -> BatchObject:
        found = await self._batches.get(request.path_params["id"], tenant_of(request))
        if found is None:
            raise ApiError(404, "There is no batch of this id: it has expired, or never was.")
        return found
