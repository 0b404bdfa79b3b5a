"""Quotas of API keys, from the flags and the file of ``--api-key-limits``.

Pure, but for reading the file. :mod:`router.http.quotas` enforces them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

Limit = Annotated[int, Meta(ge=1)]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one API key; None: no limit."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Tokens of prompts and of output."""
    concurrent_requests: Limit | None = None

    @property
    def limits_anything(self) -> bool:
        return any(getattr(self, name) is not None for name in self.__struct_fields__)


def read_key_limits(path: str) -> dict[str, KeyLimits]:
    """Read the file of ``--api-key-limits``: YAML or JSON, limits by key.

    Raises:
        ValueError: it cannot be read, or is not that.
    """
    try:
        found = msgspec.yaml.decode(Path(path).read_bytes(), type=dict[str, KeyLimits])
    except OSError as error:
        raise ValueError(f"--api-key-limits {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ValueError(f"--api-key-limits {path} must map keys to limits: {error}") from error
    return found


def limits_of(keys: Sequence[str], by_key: Mapping[str, KeyLimits], general: KeyLimits) -> list[KeyLimits]:
    """The limits of each key, in order: its own, completed from ``general``.

    Without keys, one set of limits for all clients.
    """
    own = [by_key.get(key, KeyLimits()) for key in keys] or [KeyLimits()]
    return [
        KeyLimits(
            **{
                name: getattr(limits, name) if getattr(limits, name) is not None else getattr(general, name)
                for name in KeyLimits.__struct_fields__
            }
        )
        for limits in own
    ]
