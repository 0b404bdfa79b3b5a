"""Resumable streams: how a client asks for one, and goes on with it."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.headers import client_id_of
from router.config import HttpConfig
from router.errors import ApiError, refuse
from router.http.body import decoder, read_body
from router.stored.database import StoreFull, StoreUnusable
from router.stored.listing import number_of
from router.stored.log_response import LogResponse
from router.stored.replayed_body import Handler, with_body
from router.stored.runs import NewAnswer, Purpose, Run, Runs, tenant_of
from router.stored.store import AnswerExists, AnswerState, key_of, unpacked

RESUMABLE = "x-lockstep-resumable"
"""Request header: 1 makes a stream resumable."""
PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "messages": "msg_", "responses": "resp_"}
"""Beginnings of the ids of answers, by the name of their handler."""
NO_SUCH_ANSWER = "There is no answer of this id: it has expired, was deleted, or never was."


class _Fields(msgspec.Struct):
    """Fields of any API's requests that matter before they are understood."""

    stream: bool | None = None
    request_id: str | None = None


_read_fields = decoder(_Fields)


class Streams:
    """Handlers that make streams resumable, and resume them."""

    def __init__(self, runs: Runs, config: HttpConfig) -> None:
        self._runs = runs
        self._config = config

    def __repr__(self) -> str:
        return f"<Streams of {self._runs!r}>"

    def wants(self, request: Request) -> bool:
        """Whether a request's stream is to be resumable."""
        given = request.headers.get(RESUMABLE, "")
        if given not in ("", "0", "1"):
            refuse(f"X-Lockstep-Resumable must be 1 or 0, got {given[:20]!r}.", "X-Lockstep-Resumable")
        return given == "1" or (self._config.resumable == "all" and given != "0")

    def resumable(self, kind: str, handler: Handler) -> Handler:
        """The handler of an API whose streams may be asked to be resumable."""

        async def handle(request: Request) -> Response:
            if not self.wants(request):
                return await handler(request)
            body = await read_body(request, self._config)
            fields = _read_fields(body)
            if not fields.stream:
                return await handler(with_body(request, body))
            client_id = client_id_of(request, fields.request_id)
            id = PREFIXES[kind] + client_id
            new = NewAnswer(kind, id, client_id, Purpose.RESUMABLE, body)
            run = await begun(self._runs, request, new)
            if run is None:  # without a store it is a stream like any other
                return await handler(with_body(request, body))
            return self.response(run, 0)

        return handle

    def response(self, run: Run, count: int) -> LogResponse:
        """Stream of a run's events behind the first ``count``."""
        return LogResponse(run, count, keep_alive=self._config.sse_keep_alive_interval)

    async def resume(self, request: Request) -> Response:
        """``GET /v1/streams/{id}``: the events behind ``Last-Event-ID`` or ``?after=``."""
        id: str = request.path_params["id"]
        return await self.behind(id, tenant_of(request), _behind(request, id))

    async def behind(self, id: str, tenant: str, count: int) -> Response:
        """Events of an answer's stream behind the first ``count``.

        Raises:
            ApiError: there is no such answer (404), or it has fewer events (400).
        """
        run = await self._runs.find(id, tenant)
        row = None if run is not None else await self._runs.store.get(key_of(tenant, id))
        if run is not None:
            if run.log.has_ended and count > len(run.log.events):
                beyond(count, len(run.log.events))
            return self.response(run, count)
        if row is None or row.state is AnswerState.CANCELLED or row.events is None:
            raise ApiError(404, NO_SUCH_ANSWER)
        events = unpacked(row.events)
        if count > len(events):
            beyond(count, len(events))
        ended = Run.ended(row, events)
        return self.response(ended, count)


def beyond(count: int, events: int) -> None:
    """Refuse a number behind the end of a stream."""
    refuse(f"The stream has {events} events, numbered from 0: there is nothing after {count - 1}.", "after")


async def begun(runs: Runs, request: Request, new: NewAnswer) -> Run | None:
    """A new run; None if the store cannot hold it and it need not.

    Raises:
        ApiError, MeshError: the request is refused.
    """
    try:
        return await runs.begin(request, new)
    except AnswerExists as error:
        raise ApiError(409, f"An answer {new.id} is stored already: give another request id.") from error
    except (StoreFull, StoreUnusable) as error:
        runs.complain(error)
        runs.counts.store.events["answer_not_stored"] += 1
        if new.purpose is Purpose.BACKGROUND or new.conversation:
            raise ApiError(503, "The store of answers is full or does not work.") from error
        return None


def _behind(request: Request, id: str) -> int:
    """Number of events that the client has."""
    given, name = request.query_params.get("after"), "after"
    if given is None:
        name, last = "Last-Event-ID", request.headers.get("last-event-id", "")
        if not last:
            return 0
        given = last.removeprefix(f"{id}-")
    return number_of(given, name, f"the id of an event, {id}-NUMBER, or its number") + 1
