"""Keyword arguments of the model call that runs in this thread.

Some layers of transformers drop them on the way to their attention. The attention functions find them here.
"""

from __future__ import annotations

import threading
from typing import Any


class CurrentCall(threading.local):
    """Keyword arguments of a model's call; empty between calls."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}


CURRENT = CurrentCall()


def follow_calls(module: Any, keyword: str) -> None:
    """Keep the arguments of a model's calls that have the keyword, while they run."""

    def before(_module: Any, _arguments: Any, options: dict[str, Any]) -> None:
        if keyword in options:
            CURRENT.options = options

    def after(_module: Any, _arguments: Any, _output: Any) -> None:
        CURRENT.options = {}

    for each in {id(part): part for part in (module, module.base_model)}.values():
        each.register_forward_pre_hook(before, with_kwargs=True)
        each.register_forward_hook(after, always_call=True)
