"""Repeated look-up of a listener's name, whose addresses may change between IPv4 and IPv6.

ZeroMQ resolves a name at every try to connect, but looks for one kind of address only. Which kind is an
option of the socket, so it is looked up here again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from coordinator.addresses import means_ipv6

LOOK_INTERVAL = 1.0
"""Interval of name look-ups, in seconds."""


def host_of(endpoint: str) -> str | None:
    """The host of an endpoint; None for those that are no TCP."""
    return urlsplit(endpoint).hostname if endpoint.startswith("tcp:") else None


def _is_name(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return False
    return True


class FollowedName:
    """The name in an endpoint, looked up once a second while there is no connection.

    Nothing is done for an address.
    """

    def __init__(self, endpoint: str, is_connected: Callable[[], bool], take: Callable[[bool], None]) -> None:
        """``take`` is called after each look, with True where the name means IPv6 alone.

        It is called in the loop, and not while the name cannot be resolved.
        """
        host = host_of(endpoint)
        self._name = host if host is not None and _is_name(host) else None
        self._is_connected = is_connected
        self._take = take
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<FollowedName {self._name}>"

    def begin(self) -> None:
        """Start the look-ups in the running loop, until :meth:`close`."""
        if self._name is not None and self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look(self._name))

    async def _look(self, name: str) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            if self._is_connected():
                continue
            kind = await asyncio.to_thread(means_ipv6, name)  # a resolver may take seconds
            if kind is not None and not self._is_connected():
                self._take(kind)

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
