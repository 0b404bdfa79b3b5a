"""Executor on a pretended device, in place of the usual one.

Python imports this module when it starts. The executor is replaced once it is imported, so that processes
without a model load nothing for it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REPLACED = "engine.executor.uni"


class Replacing(MetaPathFinder):
    """Finds the module of the executor, and changes it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != REPLACED:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(fullname)
        assert found is not None
        assert found.loader is not None
        execute = found.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            from tests.engine.copying_device import OnDevice

            module.UniExecutor = OnDevice  # type: ignore[attr-defined]

        found.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return found


sys.meta_path.insert(0, Replacing())
