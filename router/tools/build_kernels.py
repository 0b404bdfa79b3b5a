"""``lockstep kernels``: compiles the native kernels for other machines, as for a container image."""

from __future__ import annotations

import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from coordinator.process import process
from coordinator.settings.flags import flag, parse
from parallel import compiler
from parallel.built_kernels import DIRECTORY_VARIABLE, TARGETS
from parallel.kernel_kinds import ROWS, architecture
from parallel.native_source import NativeSource

TARGET_NAMES = tuple(target.name for target in TARGETS)


class BuildKernelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels."""

    directory: Annotated[
        str, flag(positional=True, path=True, help="Directory to fill, made if it is not there.")
    ] = "kernels"
    target: Annotated[
        tuple[str, ...],
        flag(
            help=f"Kinds of CPUs to compile for: {', '.join(TARGET_NAMES)}; without, those of this machine's "
            "architecture. Others need a cross compiler, named by CXX."
        ),
    ] = ()
    jobs: Annotated[int, Meta(ge=1), flag(help="Compilers that run at once.")] = 2


def main(argv: list[str] | None = None) -> int:
    config = parse(
        BuildKernelsConfig,
        sys.argv[1:] if argv is None else argv,
        prog="lockstep kernels",
        description="Compile the native kernels ahead, for machines without a compiler; they find them with "
        f"{DIRECTORY_VARIABLE}=DIRECTORY.",
    )
    problem = _problem(config)
    if problem is None:
        try:
            _build(config)
        except (OSError, subprocess.SubprocessError) as error:
            problem = compiler.reason(error)
    if problem is not None:
        print(f"lockstep kernels: error: {problem}", file=sys.stderr)
        return process.EXIT_FAILED
    print(f"Kernels for {', '.join(_wanted(config))}; set {DIRECTORY_VARIABLE}={config.directory}")
    return 0


def _problem(config: BuildKernelsConfig) -> str | None:
    """Why kernels cannot be compiled with these settings; None if they can."""
    if not _wanted(config):
        return f"there are no kernels for {platform.machine()}; torch computes on it"
    unknown = [name for name in config.target if name not in TARGET_NAMES]
    return (
        f"--target {' '.join(unknown)} is not known: there are {', '.join(TARGET_NAMES)}" if unknown else None
    )


def _wanted(config: BuildKernelsConfig) -> tuple[str, ...]:
    """Names of the targets to compile for."""
    here = (target.name for row in ROWS if row.architecture == architecture() for target in row.targets)
    return config.target or tuple(here)


def _build(config: BuildKernelsConfig) -> None:
    """Compile every source for every target.

    Raises:
        OSError: there is no compiler, or no room for the result.
        subprocess.SubprocessError: the compiler fails, or takes too long.
    """
    directory = Path(config.directory)
    directory.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(config.jobs) as pool:
        for target in TARGETS:
            if target.name not in _wanted(config):
                continue
            with compiler.ahead(directory, target):
                for path in pool.map(NativeSource.compiled, _sources()):
                    print(path, flush=True)


def _sources() -> list[NativeSource]:
    """Kernel sources that need no other library; imported late, as they load torch."""
    from engine.kernels.core import library
    from engine.transfers import checksums
    from parallel.links import native_links
    from parallel.rounds import native_network_rounds, native_shared_memory_rounds

    modules = library, checksums, native_shared_memory_rounds, native_network_rounds, native_links
    return [each.SOURCE for each in modules]


if __name__ == "__main__":
    sys.exit(main())
