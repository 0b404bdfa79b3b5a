"""Lockstep for Python programs: ``from lockstep import LLM, SamplingParams``.

Importing this loads nothing; the first use of a name does.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.offline.llm import LLM
    from router.offline.mesh import EngineDeadError
    from router.offline.outputs import CompletionOutput, Logprob, RequestOutput
    from router.offline.params import LoRARequest, SamplingParams
    from router.offline.pooled import PooledParams as PoolingParams
    from router.offline.pooled import PoolingRequestOutput
    from router.offline.run import GenerationError
    from router.openai_api import StructuredOutputs as StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineDeadError",
    "GenerationError",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "CompletionOutput": "router.offline.outputs:CompletionOutput",
    "EngineDeadError": "router.offline.mesh:EngineDeadError",
    "GenerationError": "router.offline.run:GenerationError",
    "LLM": "router.offline.llm:LLM",
    "LoRARequest": "router.offline.params:LoRARequest",
    "Logprob": "router.offline.outputs:Logprob",
    "PoolingParams": "router.offline.pooled:PooledParams",
    "PoolingRequestOutput": "router.offline.pooled:PoolingRequestOutput",
    "RequestOutput": "router.offline.outputs:RequestOutput",
    "SamplingParams": "router.offline.params:SamplingParams",
    "StructuredOutputsParams": "router.openai_api:StructuredOutputs",
}
"""Module and attribute behind each name of this package."""
PACKAGES = ("parallel", "coordinator", "engine", "router")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    _check_packages()
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


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
