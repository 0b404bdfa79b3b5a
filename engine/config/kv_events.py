"""Settings of ``--kv-events-config``: where changes of the prefix cache are published (pure)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MOST_KEPT = 10_000_000
"""Most batches that a queue or the replay buffer may hold."""
LONGEST_TOPIC = 255
"""Most bytes of the topic that events are published under."""
MOST_PORT = 65535
"""The highest TCP port number."""


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of published KV events, with vLLM's names and defaults."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    """How events are published; None: zmq if events are enabled."""
    endpoint: str = "tcp://*:5557"
    """PUB socket: bound where the address is a wildcard or ``ipc``, else connected."""
    replay_endpoint: str | None = None
    """ROUTER socket, always bound; None: nothing is replayed."""
    buffer_steps: Annotated[int, Meta(ge=1, le=MOST_KEPT)] = 10_000
    """Newest batches that can be replayed."""
    hwm: Annotated[int, Meta(ge=1, le=MOST_KEPT)] = 100_000
    """Batches that ZeroMQ keeps for one slow subscriber, which misses further ones."""
    max_queue_size: Annotated[int, Meta(ge=1, le=MOST_KEPT)] = 100_000
    """Batches that wait to be sent at all; further ones are dropped, and counted."""
    topic: str = ""

    def __post_init__(self) -> None:
        check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            check_endpoint("replay_endpoint", self.replay_endpoint)
            if self.replay_endpoint == self.endpoint:
                raise ValueError(f"endpoint and replay_endpoint are both {self.endpoint}: give two ports")
        if len(self.topic.encode()) > LONGEST_TOPIC:
            raise ValueError(f"topic: at most {LONGEST_TOPIC} bytes")

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def check_endpoint(name: str, endpoint: str) -> None:
    """Checks that a ZeroMQ socket outside this process can have this endpoint.

    Raises:
        ValueError: it cannot; the message says what to give.
    """
    scheme, mark, rest = endpoint.partition("://")
    if not mark or scheme not in ("tcp", "ipc"):
        hint = ": nobody outside the process could hear it" if scheme == "inproc" else ""
        raise ValueError(f"{name}: give tcp://HOST:PORT, tcp://*:PORT or ipc://PATH, not {endpoint!r}{hint}")
    if scheme == "ipc":
        if not rest:
            raise ValueError(f"{name}: ipc:// needs a path")
        return
    host, colon, port = rest.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= MOST_PORT:
        raise ValueError(f"{name}: give tcp://HOST:PORT with a port from 1 to {MOST_PORT}, not {endpoint!r}")


def is_bound(endpoint: str) -> bool:
    """Whether the PUB socket binds to this endpoint, as in vLLM, rather than connects."""
    return endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint


def endpoint_of(endpoint: str, rank: int) -> str:
    """Endpoint of one instance: the given one, with the rank added to its port.

    Raises:
        ValueError: there is no such port.
    """
    if not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    base, _, port = endpoint.rpartition(":")
    if int(port) + rank > MOST_PORT:
        raise ValueError(f"{endpoint}: instance {rank} would need port {int(port) + rank}: give a lower port")
    return f"{base}:{int(port) + rank}"


def read_config(text: str) -> KvEventsConfig:
    """Parses ``--kv-events-config``.
    Raises:
        ValueError: it is no JSON object with these settings.
    """
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`")
        raise ValueError(f"--kv-events-config: {name + ': ' if name else ''}{what}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--kv-events-config: {error}") from error
    if config.publisher == "zmq" and not config.enable_kv_cache_events:
        raise ValueError("--kv-events-config: publisher zmq publishes nothing without enable_kv_cache_events")
    return config
