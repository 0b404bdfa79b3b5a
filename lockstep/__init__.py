"""Lockstep for Python programs: ``from lockstep import LLM, SamplingParams``.

Importing this loads nothing; the first use of a name does.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.offline.llm import (
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

PACKAGES = ("parallel", "coordinator", "engine", "router")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    _check_packages()
    from router.offline import llm

    return getattr(llm, name)


def __dir__() -> list[str]:
    return __all__


def _check_packages() -> None:
    """Check that imports find our packages, whose names are common.

    Python takes the first package of a name that it finds: often what lies beside the program.

    Raises:
        ImportError: it finds another one; says which.
    """
    for name in PACKAGES:
        ours = Path(__file__).parents[1] / name / "__init__.py"
        spec = importlib.util.find_spec(name)
        found = spec.origin if spec is not None else None
        if found is not None and ours.exists() and not ours.samefile(found):
            raise ImportError(
                f"{found} stands in the way of Lockstep's package {name!r} ({ours.parent}): rename it, or "
                "move the program to another directory",
                name=name,
                path=found,
            )
