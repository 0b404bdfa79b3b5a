"""Keyword arguments of ``LLM``, the long flags of ``serve``, as a mesh's settings (pure)."""

from __future__ import annotations

import difflib
import logging
import os
import re
from typing import Any

import msgspec

from coordinator.config import MeshConfig
from coordinator.settings.command_line import NEAR
from coordinator.settings.errors import FlagError
from coordinator.settings.flags import fields_of, from_flat
from coordinator.settings.foreign import ForeignError, ForeignFlags
from engine.config import EngineConfig
from router.config import HttpConfig, ServeConfig
from router.launcher.foreign_flags import FOREIGN

logger = logging.getLogger(__name__)

OF_TEXT = (
    "tokenizer",
    "chat_template",
    "generation_config",
    "override_generation_config",
    "seed",
    "max_logprobs",
    "log_level",
)
"""Settings of the router that have a meaning without an HTTP endpoint."""

KNOWN = frozenset(OF_TEXT) | {
    field.key for config in (MeshConfig, EngineConfig) for field in fields_of(config)
}

_BUILT = msgspec.json.Decoder(ServeConfig)
"""Decoder built at import, so that all types are known before threads use them.

msgspec (0.22) looks at a type when it is first used, and two threads that do so at once crash.
"""

LONG_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")


def llm_config(arguments: dict[str, Any]) -> ServeConfig:
    """Settings from keyword arguments; None stands for the default.

    Raises:
        TypeError: there is no such argument.
        ValueError: a value of the wrong type or out of range, or arguments that clash.
    """
    foreign = ForeignFlags(FOREIGN)
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in KNOWN:
            _take_foreign(foreign, name, value)
        elif value is not None:
            given[name] = _plain(value)
    for line in foreign.said:
        logger.warning("%s", _as_arguments(line))
    if not given.get("headless"):
        given.setdefault("data_parallel_size", 1)
        given.setdefault("performance_mode", "throughput")
    try:
        config = from_flat(ServeConfig, given)
    except FlagError as error:
        raise ValueError(_as_arguments(str(error))) from error
    if config.engine.nodes.node_rank > 0:
        raise ValueError("node_rank is 0 where LLM runs: start `serve --node-rank` on the other hosts")
    return config


def _take_foreign(foreign: ForeignFlags, name: str, value: Any) -> None:
    """Take an argument of another system: ignored with a warning, or refused.

    Raises:
        TypeError: there is none, or it has another name here.
        ValueError: it means something that is not there.
    """
    flag = None if name in HttpConfig.__struct_fields__ else foreign.find(name)
    if flag is None or flag.here:
        here = "" if flag is None else f"; it is {_as_arguments(flag.here)}"
        raise TypeError(f"LLM() got an unexpected keyword argument {name!r}{here or _nearest(name)}")
    try:
        foreign.take(flag, value)
    except ForeignError as error:
        raise ValueError(_as_arguments(str(error))) from error


def _nearest(name: str) -> str:
    if name in HttpConfig.__struct_fields__:
        return ": it is a setting of the HTTP endpoint of `serve`, which LLM does not open"
    near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=NEAR)
    return f"; did you mean {near[0]!r}?" if near else "; arguments are the long flags of `serve --help`"


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch":  # dtype=torch.float32
        return str(value).removeprefix("torch.")
    return value


def _as_arguments(message: str) -> str:
    """Error text about flags, in the spelling of keyword arguments."""
    return LONG_FLAG.sub(lambda match: match[1].replace("-", "_"), message)
