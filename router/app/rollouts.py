"""Endpoints that training loops call: pauses and weights, under vLLM's and SGLang's paths.

Part of the admin API, with its port and keys. A pause is an order to all instances
(docs/design/weight-versions.md): a command to the coordinator, repeated until it is in effect everywhere.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.membership.operations import CONFLICT, FAILED
from coordinator.messages import (
    InFlight,
    OperatorAnswer,
    OperatorCommand,
    PauseMode,
    SetPause,
    State,
    UpdateWeights,
    View,
)
from router.app.ordered import BODY_LIMITS, OrderedCommands, json_answer, pause_mode, switch, unavailable
from router.errors import ApiError
from router.http.body import decoder, read_body

PAUSE_TIMEOUT = 600.0
"""Seconds for a pause, or its end, to be in effect on all instances."""
ABORT_TIMEOUT = 5.0
"""Seconds for all instances to end requests."""
FLUSH_TIMEOUT = 30.0
"""Seconds for all instances to forget cached prefixes, in memory and in files."""
UPDATE_TIMEOUT = 1200.0
"""Seconds for new weights to be in use on all instances, or given up."""
PATHS = frozenset(
    {
        "/pause",
        "/resume",
        "/is_paused",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/abort_request",
        "/abort_requests",
        "/update_weights_from_disk",
        "/get_world_size",
    }
)
"""Paths of these endpoints; under the admin API's access check."""


class OrderedMesh(Protocol):
    """Interface of the mesh that these endpoints use."""

    @property
    def view(self) -> View | None: ...
    async def reset_caches(self, timeout: float) -> list[str]: ...
    async def end_requests(
        self, request_ids: Sequence[str], timeout: float, *, everything: bool = False
    ) -> list[str]: ...


class PauseStatus(msgspec.Struct, frozen=True):
    """Answer of vLLM's ``/pause`` and ``/resume``."""

    status: Literal["paused", "resumed"]


class IsPaused(msgspec.Struct, frozen=True):
    """Answer of vLLM's ``/is_paused``."""

    is_paused: bool


class PauseGeneration(msgspec.Struct):
    """Body of SGLang's ``/pause_generation``."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class AbortRequest(msgspec.Struct):
    """Body of SGLang's ``/abort_request``."""

    rid: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Id of an answer, or the request's own."""
    abort_all: bool = False


class AbortRequests(msgspec.Struct):
    """Body of vLLM's ``/abort_requests``."""

    request_ids: Annotated[list[str], msgspec.Meta(max_length=100)] | None = None
    """Ids of answers, or the requests' own; None: all."""


class AbortedRequests(msgspec.Struct, frozen=True):
    """Answer of vLLM's ``/abort_requests``."""

    aborted: int
    """Ids that were given; those of no request count, too."""
    status: Literal["aborted"] = "aborted"


class ContinueGeneration(msgspec.Struct):
    """Body of SGLang's ``/continue_generation``."""


class GenerationStatus(msgspec.Struct, frozen=True):
    """Answer of SGLang's ``/pause_generation`` and ``/continue_generation``."""

    message: str
    status: Literal["ok"] = "ok"


class UpdateFromDisk(msgspec.Struct):
    """Body of SGLang's ``/update_weights_from_disk``."""

    model_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    """Directory with the checkpoint, on every host of the mesh."""
    weight_version: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    """Label of the version; None: its number."""
    flush_cache: bool = True
    """Without effect: blocks of other weights have other names."""
    abort_all_requests: bool = False
    in_flight: Literal["keep", "recompute", "abort", "finish"] | None = None
    """What becomes of requests in flight; SGLang has no such field."""


class UpdateAnswer(msgspec.Struct, frozen=True):
    """Answer of SGLang's ``/update_weights_from_disk``."""

    success: bool
    message: str
    num_paused_requests: int = 0


class WorldSize(msgspec.Struct, frozen=True):
    """Answer of vLLM's ``/get_world_size``."""

    world_size: int


_read_abort = decoder(AbortRequest)
_read_update = decoder(UpdateFromDisk)
_read_pause = decoder(PauseGeneration)
_read_aborts = decoder(AbortRequests)
_read_continue = decoder(ContinueGeneration)
ANSWER_PREFIXES = ("", "cmpl-", "chatcmpl-", "generate-tokens-", "resp_", "msg_")
"""What ids of answers begin with, before the id of the request."""
FLUSHED = "Cache flushed.\n"


class RolloutEndpoints:
    """Handlers of the endpoints that pause all instances, or change their weights."""

    def __init__(
        self, mesh: OrderedMesh, command: Callable[[OperatorCommand], Awaitable[OperatorAnswer]]
    ) -> None:
        self._mesh = mesh
        self._commands = OrderedCommands(mesh, command)

    def routes(self) -> list[Route]:
        return [
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/is_paused", self.is_paused, methods=["GET"]),
            Route("/pause_generation", self.pause_generation, methods=["POST"]),
            Route("/continue_generation", self.continue_generation, methods=["POST"]),
            Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            Route("/abort_request", self.abort_request, methods=["POST"]),
            Route("/abort_requests", self.abort_requests, methods=["POST"]),
            Route("/update_weights_from_disk", self.update_from_disk, methods=["POST"]),
            Route("/get_world_size", self.world_size, methods=["GET"]),
        ]

    async def pause(self, request: Request) -> Response:
        """vLLM's ``POST /pause?mode=abort|wait|keep&clear_cache=true``."""
        query = request.query_params
        waits = switch(query.get("wait_for_inflight_requests", "false"), "wait_for_inflight_requests")
        mode = pause_mode(query.get("mode", "wait" if waits else "abort"))
        clears = switch(query.get("clear_cache", "true"), "clear_cache") and mode is not PauseMode.KEEP
        await self._set(request, mode)
        if clears:
            await self._flush()
        return json_answer(PauseStatus("paused"))

    async def resume(self, request: Request) -> Response:
        await self._set(request, None)
        return json_answer(PauseStatus("resumed"))

    async def is_paused(self, _request: Request) -> Response:
        return json_answer(IsPaused(self._commands.orders.pause is not None))

    async def pause_generation(self, request: Request) -> Response:
        wanted = _read_pause(await read_body(request, BODY_LIMITS) or b"{}")
        await self._set(request, PauseMode.ABORT if wanted.mode == "abort" else PauseMode.KEEP)
        return json_answer(GenerationStatus("Generation paused successfully."))

    async def continue_generation(self, request: Request) -> Response:
        _read_continue(await read_body(request, BODY_LIMITS) or b"{}")
        await self._set(request, None)
        return json_answer(GenerationStatus("Generation continued successfully."))

    async def flush_cache(self, _request: Request) -> Response:
        """SGLang's path; requests go on with the blocks that they have."""
        await self._flush()
        return Response(FLUSHED, media_type="text/plain")

    async def abort_request(self, request: Request) -> Response:
        """SGLang's path: requests end with the reason ``abort``; 200 also if none has this id."""
        wanted = _read_abort(await read_body(request, BODY_LIMITS))
        if not (wanted.rid or wanted.abort_all):
            raise ApiError(400, "give the rid of a request, or abort_all.", param="rid")
        await self._end([wanted.rid] if wanted.rid else [], everything=wanted.abort_all)
        return Response()

    async def abort_requests(self, request: Request) -> Response:
        """vLLM's path: without ids, all requests end."""
        wanted = _read_aborts(await read_body(request, BODY_LIMITS) or b"{}")
        ids = wanted.request_ids or []
        await self._end(ids, everything=not ids)
        return json_answer(AbortedRequests(len(ids)))

    async def _end(self, ids: Sequence[str], *, everything: bool) -> None:
        names = [prefix + each for each in ids for prefix in ANSWER_PREFIXES]
        missing = await self._mesh.end_requests(names, ABORT_TIMEOUT, everything=everything)
        if missing:
            raise unavailable(f"these instances have not answered: {', '.join(sorted(missing))}")

    async def world_size(self, request: Request) -> Response:
        """Workers of all instances that serve; of one with ``include_dp=false``."""
        view = self._mesh.view
        if view is None or view.settings is None:
            raise unavailable("the mesh has not begun")
        all_instances = switch(request.query_params.get("include_dp", "true"), "include_dp")
        each = view.settings.tensor_parallel_size * view.settings.pipeline_parallel_size
        num_ready = sum(member.state is State.READY for member in view.members)
        return json_answer(WorldSize(each * (num_ready if all_instances else 1)))

    async def update_from_disk(self, request: Request) -> Response:
        """Have all instances go over to other weights; 400 where that is abandoned."""
        wanted = _read_update(await read_body(request, BODY_LIMITS))
        if not wanted.model_path.startswith("/"):
            raise ApiError(400, "model_path is an absolute path of a directory.", param="model_path")
        default = InFlight.ABORT if wanted.abort_all_requests else InFlight.KEEP
        wish = UpdateWeights(
            command=uuid.uuid4().hex,
            source=wanted.model_path,
            label=wanted.weight_version or "",
            in_flight=default if wanted.in_flight is None else InFlight(wanted.in_flight),
        )
        try:
            text = await self._commands.carry_out(request, wish, UPDATE_TIMEOUT)
        except ApiError as error:
            if error.status not in (CONFLICT, FAILED):
                raise
            refused = UpdateAnswer(success=False, message=str(error))
            return json_answer(refused, status=409 if error.status == CONFLICT else 400)
        return json_answer(UpdateAnswer(success=True, message=text))

    async def _flush(self) -> None:
        missing = await self._mesh.reset_caches(FLUSH_TIMEOUT)
        if missing:
            raise unavailable(f"these instances have not reset their caches: {', '.join(sorted(missing))}")

    async def _set(self, request: Request, mode: PauseMode | None) -> None:
        """Order a pause or its end, and wait until all instances follow."""
        wish = SetPause(command=uuid.uuid4().hex, mode=mode)
        await self._commands.carry_out(request, wish, PAUSE_TIMEOUT)
        await self._commands.see(lambda orders: orders.command == wish.command)
