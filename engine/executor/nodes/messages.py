"""Messages between an engine and the hosts of its workers, over ZeroMQ (no torch).

What is for a worker, or from one, is passed on as the bytes that :mod:`engine.executor.messages` defines;
workers are identified by their numbers in the instance (stage, then rank).
"""

from __future__ import annotations

import msgspec

from coordinator.messages import Settings
from engine.config import ModelConfig

ALIVE_INTERVAL = 0.2
"""Seconds between two signs of life, both ways.

A send to a host whose connection is gone fails.
"""
SILENCE = 10.0
"""Seconds without any sign after which the other side is gone, though the connection stands."""

# ---- a host -> the engine


class NodeJoin(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Request of a host to join, repeated until there is an answer."""

    node_rank: int
    nnodes: int
    host: str
    """Host name for messages."""
    address: str
    """Where its workers reach and are reached by those of other hosts."""
    versions: dict[str, str]
    settings: Settings | None
    """Settings of the model; None: those of the engine."""


class Hired(msgspec.Struct, frozen=True, tag="hired"):
    """The workers run; process ids by worker number."""

    pids: dict[int, int]


class MessageFromWorker(msgspec.Struct, frozen=True, tag="said"):
    """Message of a worker."""

    worker: int
    payload: bytes


class NodeEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A worker's process has ended."""

    worker: int
    status: int
    """As subprocess has it: negative for a signal."""


class NodeLeaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The host leaves, and its workers with it."""

    reason: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Sign of life, sent by both sides at intervals."""


ToEngine = NodeJoin | Hired | MessageFromWorker | NodeEnded | NodeLeaving | Alive

# ---- the engine -> a host


class NodeWait(msgspec.Struct, frozen=True, tag="wait"):
    """The host is accepted; others are missing."""

    missing: str


class NodeRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The host is refused, and why."""

    reason: str


class Hire(msgspec.Struct, frozen=True, tag="hire"):
    """All hosts have joined: start these workers. Names by worker number."""

    names: dict[int, str]
    model: ModelConfig
    """What to serve; each host finds its own copy."""
    fingerprint: str


class MessageToWorker(msgspec.Struct, frozen=True, tag="tell"):
    """Pass this on to a worker.

    What comes first is a ``Begin``; the host puts in what is its own.
    """

    worker: int
    payload: bytes


class NodeEnd(msgspec.Struct, frozen=True, tag="end"):
    """The instance ends: end its workers."""

    status: int
    """Exit status for the host's process."""
    reason: str


ToNode = NodeWait | NodeRefused | Hire | MessageToWorker | NodeEnd | Alive
