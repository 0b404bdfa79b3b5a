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
    """Address at which workers of other hosts reach those of this host."""
    versions: dict[str, str]
    settings: Settings | None
    """Settings of the model; None: those of the engine."""


class Hired(msgspec.Struct, frozen=True, tag="hired"):
    """Report that a host's workers run; process ids by worker number."""

    pids: dict[int, int]


class MessageFromWorker(msgspec.Struct, frozen=True, tag="said"):
    """Message of a worker, passed on to the engine."""

    worker: int
    payload: bytes


class NodeEnded(msgspec.Struct, frozen=True, tag="ended"):
    """Report that a worker's process has ended."""

    worker: int
    status: int
    """Exit status as subprocess has it: negative for a signal."""


class NodeLeaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Report that a host leaves, and its workers with it."""

    reason: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Sign of life, sent by both sides at intervals."""


ToEngine = NodeJoin | Hired | MessageFromWorker | NodeEnded | NodeLeaving | Alive

# ---- the engine -> a host


class NodeWait(msgspec.Struct, frozen=True, tag="wait"):
    """Answer to a host that has joined while others are missing."""

    missing: str


class NodeRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Answer to a host that cannot join, with the reason."""

    reason: str


class Hire(msgspec.Struct, frozen=True, tag="hire"):
    """Order to start a host's workers; names by worker number."""

    names: dict[int, str]
    model: ModelConfig
    """Model to serve; each host finds its own copy."""
    fingerprint: str


class MessageToWorker(msgspec.Struct, frozen=True, tag="tell"):
    """Message to a worker, passed on by its host.

    What comes first is a ``Begin``; the host puts in what is its own.
    """

    worker: int
    payload: bytes


class NodeEnd(msgspec.Struct, frozen=True, tag="end"):
    """Order to end a host's workers, since the instance ends."""

    status: int
    """Exit status for the host's process."""
    reason: str


ToNode = NodeWait | NodeRefused | Hire | MessageToWorker | NodeEnd | Alive
