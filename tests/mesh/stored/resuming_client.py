"""Client of resumable streams, which comes back after each broken connection as docs/use/stored-answers.md says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "messages": "msg_", "responses": "resp_"}
BROKEN = (aiohttp.ClientError, ConnectionError, TimeoutError)


@dataclass
class Resumed:
    """One stream as a client got it, over all its connections."""

    kind: str
    body: dict[str, Any]
    request_id: str
    events: list[bytes] = field(default_factory=list)
    breaks: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return PREFIXES[self.kind] + self.request_id

    @property
    def has_ended(self) -> bool:
        last = self.events[-1] if self.events else b""
        return (
            b"data: [DONE]" in last
            or b"message_stop" in last
            or b"event: response.completed" in last
            or (b"event: response.incomplete" in last)
        )


async def run(client: aiohttp.ClientSession, url: str, stream: Resumed, *, again_at: str = "") -> None:
    """Read a stream to its end, over as many connections as it takes.

    ``again_at``: where later ones go, unless to the same address.
    """
    headers = {"x-lockstep-resumable": "1", "x-request-id": stream.request_id}
    posted = client.post(url + PATHS[stream.kind], json=stream.body, headers=headers)
    while not stream.has_ended:
        try:
            async with posted as answer:
                if answer.status == 404 and not stream.events:  # it never began
                    posted = client.post(url + PATHS[stream.kind], json=stream.body, headers=headers)
                    continue
                if answer.status == 409:  # it had begun, and the answer was lost
                    raise ConnectionError
                if answer.status != 200:
                    stream.errors.append(f"{answer.status}: {await answer.text()}")
                    return
                rest = b""
                async for data in answer.content.iter_any():
                    *events, rest = (rest + data).split(b"\n\n")
                    stream.events += events
            if not stream.has_ended:
                raise ConnectionError
        except BROKEN:
            stream.breaks += 1
            await asyncio.sleep(0.1)
            posted = again(client, again_at or url, stream)


def again(client: aiohttp.ClientSession, url: str, stream: Resumed) -> Any:
    """The request that goes on behind the last event."""
    last = len(stream.events) - 1
    if stream.kind == "responses":
        after = f"&starting_after={last}" if stream.events else ""
        return client.get(f"{url}/v1/responses/{stream.id}?stream=true{after}")
    headers = {"last-event-id": f"{stream.id}-{last}"} if stream.events else {}
    return client.get(f"{url}/v1/streams/{stream.id}", headers=headers)
