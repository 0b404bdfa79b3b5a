"""Endpoints of stored and background responses, as OpenAI has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.model.checkpoint import CheckpointError
from router.api.answers import encode, json_response
from router.api.headers import client_id_of
from router.api.responses import wire
from router.config import HttpConfig
from router.errors import ApiError, ErrorBody, behind_items, refuse
from router.http.body import decoder, read_body
from router.http.large_bodies import run_sized
from router.stored.conversation_endpoints import NO_SUCH_CONVERSATION, page_of_items
from router.stored.conversation_store import ConversationStore
from router.stored.conversations import Item, items_of
from router.stored.listing import DeletedObject, number_of
from router.stored.replayed_body import Handler, with_body
from router.stored.runs import NewAnswer, Purpose, Run, RunRequest, Runs, tenant_of
from router.stored.store import AnswerState, StoredAnswer, id_of, key_of
from router.stored.streams import NO_SUCH_ANSWER, PREFIXES, Streams, begun
from router.text.text_models import TextModels

QUEUED, CANCELLED, FAILED, IN_PROGRESS = "queued", "cancelled", "failed", "in_progress"


class _Named(msgspec.Struct):
    id: str


class _Fields(msgspec.Struct):
    """Fields that decide whether a response is stored."""

    input: str | list[Any] = ""
    model: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: str | _Named | None = None
    request_id: str | None = None
    metadata: dict[str, Any] | None = None


class _WithOutput(msgspec.Struct):
    output: list[Item]


_read_fields = decoder(_Fields)


class StoredResponses:
    """Handlers of /v1/responses and of what lies below it."""

    def __init__(
        self,
        runs: Runs,
        streams: Streams,
        conversations: ConversationStore,
        config: HttpConfig,
        models: TextModels,
        handler: Handler,
    ) -> None:
        """``handler``: answers a response that is not stored, and makes those that are."""
        self._runs = runs
        self._streams = streams
        self._conversations = conversations
        self._config = config
        self._models = models
        self._handler = handler

    def __repr__(self) -> str:
        return f"<StoredResponses of {self._runs!r}>"

    async def create(self, request: Request) -> Response:
        """``POST /v1/responses``."""
        body = await read_body(request, self._config)
        fields = await run_sized(lambda: _read_fields(body), len(body))
        purpose = self._purpose(request, fields)
        conversation = _conversation_of(fields)
        if purpose is None and not (fields.previous_response_id or conversation):
            return await self._handler(with_body(request, body))
        client_id = client_id_of(request, fields.request_id)
        id = PREFIXES["responses"] + client_id
        before = await self._before(fields.previous_response_id, tenant_of(request))
        if conversation:  # it is the store that adds the answer to it
            purpose = purpose or Purpose.STORED
            before = await self._items_of(conversation, tenant_of(request))
        referred = "conversation" if conversation else "previous_response_id"
        with behind_items(len(before), referred):
            items = items_of(fields.input, before, id)
            if before or conversation:
                given = None if not conversation else {"id": conversation}
                body = await run_sized(lambda: _with_input(body, items, given), len(body))
            if purpose is None:
                request.state.is_resolved = True
                return await self._handler(with_body(request, body))
            added = msgspec.json.encode(items[len(before) :]) if conversation else b""
            new = NewAnswer(
                "responses", id, client_id, purpose, body, msgspec.json.encode(items), conversation, added
            )
            run = await begun(self._runs, request, new)
            if run is None:
                request.state.is_resolved = True
                return await self._handler(with_body(request, body))
            if fields.stream:
                return self._streams.response(run, 0)
            if purpose is Purpose.BACKGROUND:
                return json_response(encode(await self._unfinished(id, run.request, QUEUED)))
            return await self._whole(run)

    def _purpose(self, request: Request, fields: _Fields) -> Purpose | None:
        if fields.background:
            return Purpose.BACKGROUND
        if fields.store:
            return Purpose.STORED
        return Purpose.RESUMABLE if fields.stream and self._streams.wants(request) else None

    async def _before(self, previous: str | None, tenant: str) -> list[Item]:
        """Items of the conversation up to and with a response."""
        if not previous:
            return []
        row = await self._row(previous, tenant, "previous_response_id")
        if row.state is not AnswerState.DONE or row.answer is None:
            refuse(f"The previous response {previous} is {row.state}, not done.", "previous_response_id")
        given = msgspec.json.decode(row.input, type=list[Item])
        return given + msgspec.json.decode(row.answer, type=_WithOutput).output

    async def _items_of(self, conversation: str, tenant: str) -> list[Item]:
        found = await self._conversations.get(conversation, tenant)
        if found is None:
            raise ApiError(404, NO_SUCH_CONVERSATION, param="conversation")
        return found.items

    async def _whole(self, run: Run) -> Response:
        """The response, once it has ended."""
        with run.reader():
            await run.log.ended()
        if run.log.error is not None:
            raise run.log.error
        row = await self._row(run.id, run.tenant)
        if row.state is AnswerState.FAILED:
            failed = msgspec.json.decode(row.answer or b"{}", type=_Failed)
            raise ApiError(500, failed.error.message if failed.error else "The response failed.")
        return json_response(row.answer or b"")

    # ---- of a stored response

    async def get(self, request: Request) -> Response:
        """``GET /v1/responses/{id}``."""
        id, tenant, query = request.path_params["id"], tenant_of(request), request.query_params
        if query.get("stream", "false") not in ("true", "1"):
            return json_response(await self._answer(await self._row(id, tenant)))
        after = query.get("starting_after")
        count = 0 if after is None else number_of(after, "starting_after") + 1
        return await self._streams.behind(id, tenant, count)

    async def delete(self, request: Request) -> Response:
        """``DELETE /v1/responses/{id}``."""
        row = await self._row(request.path_params["id"], tenant_of(request))
        await self._runs.delete(row.id)
        return json_response(encode(DeletedObject(id_of(row.id), "response")))

    async def cancel(self, request: Request) -> Response:
        """``POST /v1/responses/{id}/cancel``: the response as it is then, also if it had ended."""
        row = await self._row(request.path_params["id"], tenant_of(request))
        again = _request_of(row)
        if again.purpose is not Purpose.BACKGROUND:
            refuse("Only responses with background: true can be cancelled.", "background")
        if row.state is AnswerState.RUNNING:
            id = id_of(row.id)
            await self._runs.cancel(row.id, encode(await self._unfinished(id, again, CANCELLED)))
            row = await self._row(id, row.tenant)
        return json_response(await self._answer(row))

    async def input_items(self, request: Request) -> Response:
        """``GET /v1/responses/{id}/input_items``."""
        row = await self._row(request.path_params["id"], tenant_of(request))
        items = msgspec.json.decode(row.input or b"[]", type=list[Item])
        return json_response(encode(page_of_items(request, items)))

    async def _answer(self, row: StoredAnswer) -> bytes:
        """The response as it is now."""
        again, id = _request_of(row), id_of(row.id)
        if row.state is AnswerState.RUNNING:
            return encode(await self._unfinished(id, again, IN_PROGRESS))
        if (row.state is AnswerState.FAILED and row.events in (None, b"")) or not row.answer:
            return encode(await self._unfinished(id, again, FAILED))
        if row.answer.startswith(b'{"error":{"message"'):
            response = await self._unfinished(id, again, FAILED)
            message = msgspec.json.decode(row.answer, type=ErrorBody).error.message
            response.error = wire.ResponseError("server_error", message)
            return encode(response)
        return row.answer

    async def _unfinished(self, id: str, again: RunRequest, status: str) -> wire.ResponseObject:
        """A response without output, with the values that its answer will have."""
        try:
            name, defaults = await self._models.defaults()
        except (ApiError, CheckpointError, OSError):  # what the request has is all that is known
            return _unfinished(id, again, status, "", {})
        return _unfinished(id, again, status, name, defaults)

    async def _row(self, id: str, tenant: str, param: str | None = None) -> StoredAnswer:
        """The row of a response.

        Raises:
            ApiError: there is none for this tenant (404, and 400 if a field names it).
        """
        row = await self._runs.store.get(key_of(tenant, id))
        if row is None or _request_of(row).kind != "responses":
            raise ApiError(404, NO_SUCH_ANSWER, param=param)
        return row


class _Failed(msgspec.Struct):
    error: wire.ResponseError | None = None


def _request_of(row: StoredAnswer) -> RunRequest:
    return msgspec.msgpack.decode(row.request, type=RunRequest)


def _unfinished(
    id: str, again: RunRequest, status: str, model: str, defaults: Mapping[str, Any]
) -> wire.ResponseObject:
    """A response without output; ``defaults``: the model's, for what its request leaves out."""
    asked = msgspec.json.decode(again.body, type=wire.ResponsesRequest)
    return wire.ResponseObject(
        id=id,
        created_at=again.created,
        model=asked.model or model,
        status=status,
        output=[],
        usage=None,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        temperature=defaults.get("temperature", 1.0) if asked.temperature is None else asked.temperature,
        top_p=defaults.get("top_p", 1.0) if asked.top_p is None else asked.top_p,
        top_logprobs=asked.top_logprobs or 0,
        tools=asked.tools or [],
        tool_choice=asked.tool_choice or "auto",
        text=asked.text or {"format": {"type": "text"}},
        reasoning=asked.reasoning or {"effort": None, "summary": None},
        metadata=asked.metadata or {},
        user=asked.user,
        store=asked.store is not False,
        background=bool(asked.background),
        previous_response_id=asked.previous_response_id,
        conversation=asked.conversation,
    )


def _with_input(body: bytes, items: list[Item], conversation: dict[str, str] | None) -> bytes:
    """A request's body with the whole conversation as its input."""
    given = msgspec.json.decode(body)
    return msgspec.json.encode(given | {"input": items, "conversation": conversation})


def _conversation_of(fields: _Fields) -> str:
    """Id of the conversation that a request names; empty for none."""
    named = fields.conversation
    if not named:
        return ""
    if fields.previous_response_id:
        refuse("Give conversation or previous_response_id, not both.", "conversation")
    return named if isinstance(named, str) else named.id
