"""Watch over the endpoints of a picker: resolves names, reads the file, checks health."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from coordinator.rpc.complaints import Complaints
from router.epp.endpoints import Endpoint, EndpointError, EndpointTarget, joined, read_file, updated

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 1.0
"""Seconds between two checks of an endpoint, a name, and the file."""
CHECK_TIMEOUT = 2.0
"""Seconds for an endpoint to answer a check, or for a name to be resolved."""
MAX_FILE_BYTES = 1 << 20
"""Largest endpoints file."""
MOST_ENDPOINTS = 1024
"""Endpoints that are used; more are left out."""
CHECK = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class EndpointWatch:
    """Endpoints with their addresses and health; ``run`` keeps them up to date."""

    def __init__(self, targets: Sequence[EndpointTarget] = (), file: str | None = None) -> None:
        self._targets = list(targets)
        self._file = None if file is None else Path(file)
        self._listed: list[EndpointTarget] = []
        self._resolved: dict[EndpointTarget, list[str]] = {}
        """The last addresses of each target: one that cannot be resolved now keeps them."""
        self._tls: dict[str, bool] = {}
        self._complaints = Complaints(logger, "an endpoint cannot be found, trying again")
        self.endpoints: dict[str, Endpoint] = {}
        """By address."""

    def __repr__(self) -> str:
        return f"<EndpointWatch {list(self.endpoints.values())}>"

    @property
    def has_ready(self) -> bool:
        """Whether an endpoint answered its last check."""
        return any(each.failures == 0 for each in self.endpoints.values())

    async def run(self) -> None:
        """Look every ``LOOK_INTERVAL`` seconds until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_INTERVAL)

    async def look(self) -> None:
        """Read the file, resolve all names, and check each endpoint once."""
        self._read_file()
        targets = list(dict.fromkeys((*self._targets, *self._listed)))
        found = await asyncio.gather(*map(self._resolve, targets))
        self._resolved = dict(zip(targets, found, strict=True))
        self._tls = {address: target.tls for target in targets for address in self._resolved[target]}
        before = set(self.endpoints)
        self.endpoints = updated(self.endpoints, list(self._tls)[:MOST_ENDPOINTS])
        if before != set(self.endpoints):
            logger.info("endpoints: %s", ", ".join(self.endpoints) or "none")
        await asyncio.gather(*map(self._check, list(self.endpoints.values())))

    def _read_file(self) -> None:
        """Take over what the file lists now; a file that cannot be read changes nothing."""
        if self._file is None:
            return
        try:
            with self._file.open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
            if len(text) > MAX_FILE_BYTES:
                raise EndpointError(f"more than {MAX_FILE_BYTES} bytes")
            self._listed = read_file(text.decode())
        except (OSError, UnicodeDecodeError, EndpointError) as error:
            self._complaints.add(f"{self._file}: {error}")

    async def _resolve(self, target: EndpointTarget) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                infos = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError) as error:
            self._complaints.add(f"{target.host}: {error or 'not resolved in time'}")
            return self._resolved.get(target, [])
        return [joined(str(info[4][0]), target.port) for info in infos]

    async def _check(self, endpoint: Endpoint) -> None:
        is_well = await is_healthy(endpoint, tls=self._tls[endpoint.address])
        if is_well != (endpoint.failures == 0) and endpoint.failures is not None:
            logger.info("endpoint %s %s", endpoint.address, "is ready" if is_well else "fails its check")
        endpoint.failures = 0 if is_well else (endpoint.failures or 0) + 1


async def is_healthy(endpoint: Endpoint, *, tls: bool = False) -> bool:
    """Whether an endpoint answers /health with 200, as it does while an instance is ready.

    Its certificate is not verified: the gateway decides whether to trust it.
    """
    context = None
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    writer = None
    try:
        async with asyncio.timeout(CHECK_TIMEOUT):
            host, port = endpoint.host, int(endpoint.address.rpartition(":")[2])
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.write(CHECK)
            await writer.drain()
            status = await reader.readline()
    except (OSError, TimeoutError, ValueError):
        return False
    finally:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
    return status.split(b" ")[1:2] == [b"200"]
