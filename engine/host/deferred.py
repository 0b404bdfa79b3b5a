"""Faster imports of torch and transformers: modules that instances rarely use load late.

Both import, when they are loaded, compilers, tracers, optimisers and ways to train. Three things spare that:

- The code of modules named in :data:`DEFERRED` waits. They are found and put in their places as ever; when
  somebody asks one of them for something, or for a submodule, all run, in this order. Submodules named in
  :data:`EARLY` can be imported before.
- transformers finds torch without what is named in :data:`LACKING`. It supports such builds of torch,
  and then leaves out what stands on it. (Lockstep shards models in its own way.)
- What transformers finds by reading the files of all its models, twice, is kept in a cache.

Only processes that compute do this, before they load anything: :mod:`engine.host.fork_server`,
:mod:`engine.__main__`, :mod:`engine.executor.worker`. A program that imports Lockstep gets its libraries as
they are.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from parallel.caches import cache_directory, is_trusted, own_directory

OFF = "LOCKSTEP_WHOLE_LIBRARIES"
"""Environment variable; 1: import torch and transformers completely at start."""

DEFERRED: tuple[str, ...] = ("torch._meta_registrations", "torch.export", "torch._dynamo")
"""Deferred modules: meta-device decompositions, export and the compiler.

A model that cannot be loaded without them gets another try (:func:`engine.model.weights.load_model`).
"""
EARLY = frozenset(
    {
        "torch._dynamo._trace_wrapped_higher_order_op",
        "torch.export._tree_utils",
        "torch.export.graph_signature",
    }
)
"""Submodules of these that torch and transformers import, and that do not need what waits.

Others, which say torchvision imports, may ask their parent for something while they run. The parent would
then import them in turn, half made.
"""
MARKS = {"torch._dynamo": ("allow_in_graph", "assume_constant_result", "disable")}
"""Decorators that only tell the compiler about a function.

Until that is loaded they change nothing.
"""
LACKING = ("is_torch_distributed_available", "is_torch_flex_attn_available")
"""Functions of ``transformers.utils.import_utils`` that say no."""
SCAN = "create_import_structure_from_path"
"""The function there that reads the files of a directory."""

_waiting: dict[str, _Deferred] = {}
_lock = threading.RLock()


class _Deferred(Loader):
    """Loader that postpones running one module's code until first use."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._module: ModuleType | None = None
        self._stand_in: Callable[[str], Any] | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        def wanted(name: str) -> Any:
            """The module's ``__getattr__`` (PEP 562) until its code has run."""
            if name.startswith("__") and name.endswith("__"):
                raise AttributeError(name)  # the import system and inspect ask any module for these
            if module.__name__ in _waiting and name in MARKS.get(module.__name__, ()):
                return _unchanged
            run_deferred()
            if name in module.__dict__:
                return module.__dict__[name]
            own = module.__dict__.get("__getattr__")
            if own is None or own is wanted:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return own(name)

        self._module, self._stand_in = module, wanted
        module.__dict__["__getattr__"] = wanted
        _waiting[module.__name__] = self

    def run(self) -> None:
        assert self._module is not None
        self._loader.exec_module(self._module)
        if self._module.__dict__.get("__getattr__") is self._stand_in:
            del self._module.__dict__["__getattr__"]


def run_deferred() -> bool:
    """Run the code of all deferred modules; False if there was none.

    Meanwhile other threads that ask one of them for something wait. A module that runs finds in itself what
    it has defined so far.
    """
    with _lock:
        ran = False
        for name in DEFERRED:
            waits = _waiting.pop(name, None)
            if waits is not None:
                waits.run()
                ran = True
        return ran


class _Changed(Loader):
    """Loader of ``transformers.utils.import_utils`` that changes some of its functions."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for name in LACKING:
            setattr(module, name, _no)
        if hasattr(module, SCAN):
            setattr(module, SCAN, _Scan(getattr(module, SCAN)))


def _no() -> bool:
    return False


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """Identity decorator, which stands in for the compiler's, with or without arguments."""
    return _unchanged if function is None else function


class _Found(msgspec.Struct, frozen=True):
    """Names that transformers exports from a directory of its sources.

    transformers has dictionaries with keys of two kinds.
    """

    files: list[tuple[list[str], dict[str, list[str]]]]
    """Packages that names need, and the names of each file that need them."""
    directories: dict[str, _Found]

    @classmethod
    def fold(cls, found: dict[Any, Any]) -> _Found:
        return cls(
            [
                (sorted(needs), {file: sorted(names) for file, names in files.items()})
                for needs, files in found.items()
                if not isinstance(needs, str)
            ],
            {name: cls.fold(below) for name, below in found.items() if isinstance(name, str)},
        )

    def unfold(self) -> dict[Any, Any]:
        found: dict[Any, Any] = {name: below.unfold() for name, below in self.directories.items()}
        for needs, files in self.files:
            found[frozenset(needs)] = {file: set(names) for file, names in files.items()}
        return found


class _Scan:
    """transformers' scan function, with a cache file for the directory of all models."""

    def __init__(self, scan: Callable[[str], Any]) -> None:
        self._scan = scan
        self._kept: dict[Path, _Found] = {}

    def __call__(self, module_path: str | Path) -> Any:
        path = Path(module_path)
        directory = path.parent if path.is_file() else path
        if directory.name != "models":
            return self._scan(str(module_path))
        try:
            file = cache_directory("libraries") / f"models-{_state(directory)}.json"
        except OSError:
            return self._scan(str(module_path))
        kept = self._kept.get(file)
        if kept is None:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                if is_trusted(file.parent) and is_trusted(file):  # it names what is imported
                    kept = self._kept[file] = msgspec.json.decode(file.read_bytes(), type=_Found)
        if kept is not None:
            return kept.unfold()  # anew each time: a caller may change what it got
        found = self._scan(str(module_path))
        with contextlib.suppress(AttributeError, TypeError):  # of another kind: it is not kept
            kept = _Found.fold(found)
            if kept.unfold() == found:
                self._keep(file, kept)
        return found

    def _keep(self, file: Path, kept: _Found) -> None:
        self._kept[file] = kept
        fresh = file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            own_directory("libraries")
            try:
                fresh.write_bytes(msgspec.json.encode(kept))
                fresh.chmod(0o644)  # whatever the umask
                fresh.rename(file)
            finally:
                fresh.unlink(missing_ok=True)  # half of it, on a disk that is full


def _state(directory: Path) -> str:
    """Digest of the Python files below a directory, by time and size."""
    digest = hashlib.sha256(str(directory).encode())
    for path, directories, files in os.walk(directory):
        directories.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                status = os.stat(os.path.join(path, name))
                digest.update(f"{name} {status.st_mtime_ns} {status.st_size}".encode())
    return digest.hexdigest()[:16]


def _waits_above(name: str) -> bool:
    """Whether a deferred parent module must run before this submodule is imported."""
    root, _, _ = name.partition(".")
    if name in EARLY or not any(name.startswith(f"{each}.") for each in tuple(_waiting)):
        return False
    # What a package imports while it runs itself, it imports at its own risk.
    return not getattr(getattr(sys.modules.get(root), "__spec__", None), "_initializing", False)


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in DEFERRED and name != "transformers.utils.import_utils":
            if _waits_above(name):
                run_deferred()
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Deferred(spec.loader) if name in DEFERRED else _Changed(spec.loader)
        return spec


def trim() -> None:
    """Install the deferred imports; modules already loaded are unaffected."""
    if os.environ.get(OFF) != "1" and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@contextlib.contextmanager
def no_garbage(leaves: bool = False) -> Iterator[None]:
    """Pause garbage collection while libraries or a model are loaded.

    The million objects that are made and kept are never searched, neither now nor later. ``leaves``: garbage
    is made as well, which is collected at the end.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if leaves:
            gc.collect()
        gc.freeze()
        if was_enabled:
            gc.enable()
