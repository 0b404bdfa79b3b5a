"""Commands to the coordinator about standing orders, repeated until all instances follow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from coordinator.membership.operations import ACCEPTED, DONE
from coordinator.messages import OperatorAnswer, OperatorCommand, PauseMode, StandingOrders, View
from router.config import HttpConfig
from router.errors import ApiError

BODY_LIMITS = HttpConfig(max_request_bytes=10_000, request_timeout=10.0)
"""Limits of a command's body: bytes and seconds."""
ASK_INTERVAL = 0.02
"""Seconds between two questions whether all instances follow."""
VIEW_LOOKS = 50
"""Times that a router looks whether its view has an order, at that interval."""


class HasView(Protocol):
    """What knows the coordinator's newest view."""

    @property
    def view(self) -> View | None: ...


class OrderedCommands:
    """Sends commands about standing orders, and waits for all instances."""

    def __init__(
        self, mesh: HasView, command: Callable[[OperatorCommand], Awaitable[OperatorAnswer]]
    ) -> None:
        self._mesh = mesh
        self._command = command

    @property
    def orders(self) -> StandingOrders:
        """The newest orders that this router knows of.

        Raises:
            ApiError: it knows of none yet (503).
        """
        view = self._mesh.view
        if view is None:
            raise unavailable("the coordinator has not answered yet: is it running? see -dpa and -dpp")
        return view.orders

    async def carry_out(self, request: Request, wish: OperatorCommand, timeout: float) -> str:
        """Send a command until all instances follow; returns the last answer's text.

        It stays ordered if the client goes away.
        """
        text = "the coordinator has not answered"
        try:
            async with asyncio.timeout(timeout):
                while not await request.is_disconnected():
                    try:
                        answer = await self._command(wish)
                    except TimeoutError:
                        continue  # the coordinator may be away for a moment
                    if answer.status == DONE:
                        return answer.text
                    if answer.status != ACCEPTED:
                        raise ApiError(answer.status, answer.text)
                    text = answer.text
                    await asyncio.sleep(ASK_INTERVAL)
        except TimeoutError as error:
            raise ApiError(408, f"not done after {timeout:g} s, though it goes on: {text}") from error
        return text

    async def see(self, has_it: Callable[[StandingOrders], bool]) -> None:
        """Wait a moment until this router's view has an order, too.

        The next question may be about it.
        """
        for _ in range(VIEW_LOOKS):
            if self._mesh.view is not None and has_it(self._mesh.view.orders):
                return
            await asyncio.sleep(ASK_INTERVAL)


def json_answer(answer: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, headers={"retry-after": "1"})


def switch(text: str, name: str) -> bool:
    """A parameter of a query that is true or false.

    Raises:
        ApiError: it is neither (400).
    """
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise ApiError(400, f"{name} is true or false, not {text!r}", param=name)
    return known[text.lower()]


def pause_mode(text: str) -> PauseMode:
    """What becomes of requests, by its name.

    Raises:
        ApiError: there is no such mode (400).
    """
    try:
        return PauseMode(text)
    except ValueError as error:
        modes = ", ".join(PauseMode)
        raise ApiError(
            400, f"there is no mode {text!r} of a pause: choose one of {modes}", param="mode"
        ) from error
