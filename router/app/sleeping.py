"""Endpoints for sleep and waking of all instances, under vLLM's and SGLang's paths.

Part of the admin API, with its port and keys. Sleep is an order to all instances
(docs/design/weight-versions.md): they give back memory, and new requests wait.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.messages import (
    MemoryPart,
    OperatorAnswer,
    OperatorCommand,
    PauseMode,
    SetSleep,
    WakeUp,
)
from router.app.ordered import BODY_LIMITS, HasView, OrderedCommands, json_answer, pause_mode
from router.errors import ApiError
from router.http.body import decoder, read_body

SLEEP_TIMEOUT = 600.0
"""Seconds for all instances to give back memory, or to have it again."""
SLEEP_PATHS = frozenset({"/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"})
"""Paths of these endpoints; under the admin API's access check."""
LEVELS = ("1", "2")


class MemoryTags(msgspec.Struct):
    """Body of SGLang's ``/release_memory_occupation`` and ``/resume_memory_occupation``."""

    tags: Annotated[list[str], msgspec.Meta(max_length=16)] | None = None
    """``weights``, ``kv_cache``; None: both."""


class SleepStatus(msgspec.Struct, frozen=True):
    """Answer of the calls to sleep and to wake up."""

    message: str
    success: bool = True


_read_tags = decoder(MemoryTags)


class SleepEndpoints:
    """Handlers of the endpoints that put all instances to sleep, and wake them up."""

    def __init__(
        self, mesh: HasView, command: Callable[[OperatorCommand], Awaitable[OperatorAnswer]]
    ) -> None:
        self._commands = OrderedCommands(mesh, command)

    def routes(self) -> list[Route]:
        post, both = ["POST"], ["GET", "POST"]
        return [
            Route("/sleep", self.sleep, methods=post),
            Route("/wake_up", self.wake_up, methods=post),
            Route("/release_memory_occupation", self.release, methods=both),
            Route("/resume_memory_occupation", self.take_back, methods=both),
        ]

    async def sleep(self, request: Request) -> Response:
        """vLLM's ``POST /sleep?level=1|2&mode=abort|wait|keep&tags=weights``."""
        query = request.query_params
        level = query.get("level", "1")
        if level not in LEVELS:
            raise ApiError(400, "level is 1 or 2; /pause stops requests alone", param="level")
        mode = pause_mode(query.get("mode", "abort"))
        return await self._sleep(request, _parts(query.getlist("tags")), mode, int(level))

    async def wake_up(self, request: Request) -> Response:
        """vLLM's ``POST /wake_up?tags=weights&tags=kv_cache``; without tags all is taken back."""
        return await self._wake_up(request, _parts(request.query_params.getlist("tags")))

    async def release(self, request: Request) -> Response:
        """SGLang's path; requests in flight wait, and are computed again where their blocks are gone."""
        wanted = _read_tags(await read_body(request, BODY_LIMITS) or b"{}")
        return await self._sleep(request, _parts(wanted.tags or ()), PauseMode.KEEP, 1)

    async def take_back(self, request: Request) -> Response:
        wanted = _read_tags(await read_body(request, BODY_LIMITS) or b"{}")
        return await self._wake_up(request, _parts(wanted.tags or ()))

    async def _sleep(
        self, request: Request, parts: tuple[MemoryPart, ...], mode: PauseMode, level: int
    ) -> Response:
        wish = SetSleep(command=uuid.uuid4().hex, parts=parts or tuple(MemoryPart), level=level, mode=mode)
        return await self._order(request, wish)

    async def _wake_up(self, request: Request, parts: tuple[MemoryPart, ...]) -> Response:
        return await self._order(request, WakeUp(command=uuid.uuid4().hex, parts=parts))

    async def _order(self, request: Request, wish: SetSleep | WakeUp) -> Response:
        text = await self._commands.carry_out(request, wish, SLEEP_TIMEOUT)
        await self._commands.see(lambda orders: orders.sleep_command == wish.command)
        return json_answer(SleepStatus(text))


def _parts(tags: Sequence[str]) -> tuple[MemoryPart, ...]:
    """Parts of the memory by their tags, each of which may list several."""
    names = [name for tag in tags for name in tag.split(",")]
    try:
        return tuple(MemoryPart(name) for name in names)
    except ValueError as error:
        known = " and ".join(MemoryPart)
        raise ApiError(400, f"{error}: there are {known}", param="tags") from error
