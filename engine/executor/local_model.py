"""This host's copy of a model that an engine elsewhere serves (no torch).

Each host reads its own files. Its worker's first message, which comes from the engine, gets their paths.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.config import ModelConfig
from engine.executor.messages import Begin, ToWorker
from engine.model.checkpoint import ModelInfo, fingerprint, read_model_info
from engine.model.finding import find_model


def find_copy(model: ModelConfig) -> tuple[ModelInfo, str]:
    """This host's copy of a model, and its fingerprint.

    Raises:
        engine.model.errors.CheckpointError: there is none that can be read.
    """
    weights = model.reads_weights
    info = read_model_info(find_model(model.model, model.revision, weights=weights), weights=weights)
    return info, fingerprint(info, weights=weights)


def differs(directory: str, found: str, model: str | None, expected: str) -> str:
    """Error text if a host's copy is not the engine's model by fingerprint, else empty."""
    if found == expected:
        return ""
    return (
        f"{directory} (fingerprint {found}) is not the model of the engine ({model}, fingerprint {expected})"
    )


def begin_of(payload: bytes) -> Begin:
    """A worker's first message."""
    begin = msgspec.msgpack.decode(payload, type=ToWorker)
    assert isinstance(begin, Begin)
    return begin


def with_own(begin: Begin, info: ModelInfo, **own: Any) -> bytes:
    """A worker's first message with this host's copy of the model put in."""
    return msgspec.msgpack.encode(msgspec.structs.replace(begin, info=info, **own))
