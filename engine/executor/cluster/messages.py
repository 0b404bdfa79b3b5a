"""Messages in calls of actors, as msgpack, between an engine or launcher and actors."""

from __future__ import annotations

import msgspec

from engine.config import ModelConfig


class PlaceQuery(msgspec.Struct, frozen=True):
    """Question for an actor's place; a model is looked up there."""

    model: ModelConfig | None = None


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Place of an actor: its host, its versions, and the model found there."""

    host: str
    address: str
    """Address of the node, as Ray knows it."""
    pid: int
    boot: str
    """Equal for processes that see each other's ids."""
    versions: dict[str, str]
    directory: str = ""
    fingerprint: str = ""
    problem: str = ""
    """Reason for which the model cannot be read there."""


class StartInstance(msgspec.Struct, frozen=True, kw_only=True):
    """Order to start an instance."""

    argv: list[str]
    """Arguments of ``python -m engine``."""
    environment: dict[str, str]
    """Environment variables that are added to the node's."""


class InstanceProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Output of an instance since the last message, and its exit status, if any."""

    output: bytes
    status: int | None
