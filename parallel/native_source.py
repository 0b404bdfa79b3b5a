"""C++ sources of Lockstep: compiled at first use, checked, and loaded with their functions.

This module loads no torch, and does not know what a source computes. A source exports functions
``lockstep_<name>``; they are found in its text. A module that has one describes it by a
:class:`NativeSource`, and binds what it calls often, with its types.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from parallel import compiler

logger = logging.getLogger(__name__)

EXPORTED = re.compile(r'^(?:extern "C" )?[\w* ]+\b(lockstep_\w+)\(', re.MULTILINE)
"""A function of the sources that is called from Python."""

Made = TypeVar("Made")


class NativeLibrary:
    """A loaded shared object, and its functions ``lockstep_<name>``."""

    def __init__(self, path: Path, symbols: Sequence[str], *, keeps_errno: bool = False) -> None:
        self.path = path
        self._loaded = ctypes.CDLL(str(path), use_errno=keeps_errno)
        for symbol in symbols:
            getattr(self._loaded, symbol).restype = ctypes.c_int64  # by attribute: an index makes a new one

    def call(self, name: str, *values: int) -> int:
        """Call ``lockstep_<name>`` with whole numbers and addresses; 0 where it returns nothing."""
        return int(getattr(self._loaded, f"lockstep_{name}")(*map(ctypes.c_int64, values)))

    def text(self, name: str) -> str:
        """The text that ``lockstep_<name>`` points to."""
        return ctypes.string_at(self.call(name)).decode()

    def bind(self, name: str, *arguments: Any, result: Any = ctypes.c_int64) -> Any:
        """The function ``lockstep_<name>`` with its types; for calls that must not take long."""
        function = getattr(self._loaded, f"lockstep_{name}")
        function.argtypes, function.restype = arguments, result
        return function

    def check_bytes(self, sizes: Mapping[str, int]) -> None:
        """Check ``lockstep_<name>_bytes`` of structs that both sides describe.

        Raises:
            OSError: one has another size in C++.
        """
        for name, num_bytes in sizes.items():
            if (found := self.call(f"{name}_bytes")) != num_bytes:
                raise OSError(f"{name} has {found} bytes in {self.path.name}, and {num_bytes} in Python")


@dataclass(frozen=True, kw_only=True)
class NativeSource:
    """A C++ source, its compilation, and the log line where it cannot be used."""

    path: Path
    headers: tuple[Path, ...] = ()
    """Files that it includes from here; a folder stands for all headers in it."""
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    """Features of the CPU, as Linux names them."""
    structs: Mapping[str, type[ctypes.Structure]] = field(default_factory=dict)
    """Structs that both sides describe, by the name of the function that knows the size."""
    keeps_errno: bool = False
    """Whether callers ask for ``ctypes.get_errno``."""
    off: str | None = None
    """Environment variable that turns the source off by 0."""
    absent: str
    """Beginning of log lines that name why it is absent, such as ``native links: off,``."""
    instead: str = ""
    """How the line about a failed compilation ends."""

    def files(self) -> list[Path]:
        """The source, then all headers."""
        headers = (sorted(each.rglob("*.hpp")) if each.is_dir() else [each] for each in self.headers)
        return [self.path, *(path for found in headers for path in found)]

    def symbols(self) -> list[str]:
        """Names of all functions that it exports."""
        return [name for path in self.files() for name in EXPORTED.findall(path.read_text())]

    def compiled(self, *more: str) -> Path:
        """The shared object, with more flags; raises as :func:`parallel.compiler.compiled` does."""
        _, *headers = self.files()
        return compiler.compiled(self.path, headers, [*self.flags, *more], self.symbols())

    def open(self, *more: str) -> NativeLibrary:
        """The source compiled and loaded, whatever the environment has turned off.

        Raises:
            OSError: it cannot be compiled or loaded, or does not fit the Python side.
            subprocess.SubprocessError: the compiler fails, or takes too long.
        """
        library = NativeLibrary(self.compiled(*more), self.symbols(), keeps_errno=self.keeps_errno)
        library.check_bytes({name: ctypes.sizeof(struct) for name, struct in self.structs.items()})
        return library

    def load(
        self, make: Callable[[NativeLibrary], Made], *more: str, asked: str | None = None
    ) -> Made | None:
        """What ``make`` binds of the source; None for a reason that is logged.

        ``asked`` stands in for the value of the environment variable.
        """
        if self.off is not None and (asked or os.environ.get(self.off)) == "0":
            logger.info("%s (%s=0)", self.absent[:-1], self.off)
            return None
        if missing := self.needs - compiler.cpu_flags():
            logger.info("%s this CPU lacks %s", self.absent, ", ".join(sorted(missing)))
            return None
        try:
            return make(self.open(*more))
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            logger.warning("%s %s%s", self.absent, compiler.reason(error), self.instead)
            return None
