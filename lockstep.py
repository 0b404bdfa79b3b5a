"""Lockstep for Python programs: ``from lockstep import LLM, SamplingParams``.

Importing this loads nothing; the first use of a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.llm import (
        LLM,
        CompletionOutput,
        EngineDeadError,
        GenerationError,
        Logprob,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineDeadError",
    "GenerationError",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    from router import llm

    return getattr(llm, name)


def __dir__() -> list[str]:
    return __all__
