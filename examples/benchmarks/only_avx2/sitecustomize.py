"""Hook of another Python environment: torch answers that the CPU has AVX2 and nothing beyond.

vLLM chooses its compiled library by these answers. Python imports this file at its start where the folder is
on PYTHONPATH (``bench_peers.py --instructions avx2``).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

ASKED = "torch.cpu"
BEYOND = ("avx512", "vnni", "amx")
"""Parts of the names of torch's questions that get no for an answer."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of :data:`ASKED`, which others find and this one alters."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != ASKED:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(fullname)
        if found is not None and found.loader is not None:
            found.loader = _Loader(found.loader)
        return found


class _Loader(importlib.abc.Loader):
    """Loader of a module that then has other answers."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for name in vars(module).copy():
            if name.startswith("_is_") and any(part in name for part in BEYOND):
                setattr(module, name, lambda: False)


sys.meta_path.insert(0, _Finder())
