"""Installations of UCX on this host, from their files (loads neither UCX nor torch).

The wheels on PyPI (``libucx-cu12``, ``libucx-cu13``) are built without InfiniBand and RoCE, which only the
packages of distributions and of network vendors have. So one of those is preferred to a wheel.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PREFIX = "LOCKSTEP_UCX"
"""Environment variable: directory that UCX was installed into, with ``include`` and ``lib``."""
SYSTEM = ("/opt/mellanox/ucx", "/opt/ucx", "/usr/local", "/usr")
"""Directories where packages install UCX, the vendor's first."""
ADVICE = (
    "pip install 'lockstep-mesh[ucx]' brings one for TCP and shared memory; for InfiniBand and RoCE install "
    "the distribution's or the network vendor's (Debian: libucx-dev ibverbs-providers)"
)
"""Advice for users on how to install UCX."""
_LIBRARY = "libucp.so.0"
_MODULE = "libuct_ib.so.0"


class Installation(NamedTuple):
    """One UCX on this host."""

    library: Path
    """Path of the installation's libucp."""
    headers: Path
    """A directory with ``ucp/api/ucp.h``; the interface is the same for all of UCX 1."""
    has_rdma: bool
    """Whether the installation supports InfiniBand and RoCE."""

    def __str__(self) -> str:
        return f"{self.library} ({'with' if self.has_rdma else 'without'} InfiniBand and RoCE)"


def find_ucx(system: Sequence[str] = SYSTEM) -> Installation:
    """The UCX to use: that of :data:`PREFIX`, else one with RDMA, else the wheel's.

    Raises:
        OSError: there is none, or none with headers; the message says how to get one.
    """
    wheel = _wheel()
    named = os.environ.get(PREFIX)
    if named:
        library = next(_libraries(Path(named)), None)
        if library is None:
            raise OSError(f"{PREFIX}={named}: there is no {_LIBRARY} in its lib")
        found = [_installation(library, Path(named), wheel)]
    else:
        found = [
            _installation(library, prefix, wheel)
            for prefix in (*map(Path, system), *([wheel] if wheel else []))
            for library in _libraries(prefix)
        ]
        if not found:
            raise OSError(f"UCX is not installed: {ADVICE}")
    complete = [each for each in found if each is not None]
    if not complete:
        raise OSError(f"UCX has no headers here: {ADVICE}")

    def preference(each: Installation) -> tuple[bool, bool]:
        return each.has_rdma, wheel is not None and wheel in each.library.parents

    return max(complete, key=preference)


def _wheel() -> Path | None:
    spec = importlib.util.find_spec("libucx")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def _libraries(prefix: Path) -> Iterator[Path]:
    for directory in (prefix / "lib", prefix / "lib64", *sorted(prefix.glob("lib/*-linux-gnu"))):
        if (directory / _LIBRARY).exists():
            yield directory / _LIBRARY


def _installation(library: Path, prefix: Path, wheel: Path | None) -> Installation | None:
    """None without headers."""
    for place in (prefix, wheel):
        if place is not None and (place / "include" / "ucp" / "api" / "ucp.h").exists():
            has_rdma = (library.parent / "ucx" / _MODULE).exists()
            return Installation(library, place / "include", has_rdma)
    return None
