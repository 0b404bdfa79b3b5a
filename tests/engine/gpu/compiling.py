"""What the launchers launch, compiled for devices that are not here.

The launchers run on tensors without memory (torch's device ``meta``). Triton binds and specialises their
arguments as it does before a real launch, compiles to machine code, and launches nothing. A process that uses
this must not have loaded triton for its interpreter.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

META = torch.device("meta")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """One kernel, as compiled for one kind of arguments."""

    name: str
    constants: dict[str, Any]
    shared: int
    """Bytes of shared memory of a program."""
    registers: int
    """Registers of a thread."""
    stack: int
    """Bytes of a thread in memory, mostly registers that were spilled."""


class _Driver:
    """In place of a device's driver."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # by which Triton keeps what it has compiled

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """While it lasts, what is launched is compiled instead.

    The list grows by what was not compiled yet.
    """
    compiled: list[Compiled] = []
    run = JITFunction.run
    seen: set[int] = set()

    def compile_only(kernel: Any, *arguments: Any, grid: tuple[int, ...], warmup: bool, **constants: Any):
        assert all(0 < each < 65536 for each in grid[1:]), (kernel.__name__, grid)
        assert 0 < grid[0] < 2**31, (kernel.__name__, grid)
        made = run(kernel, *arguments, grid=grid, warmup=True, **constants)
        if id(made) not in seen:
            seen.add(id(made))
            compiled.append(Compiled(kernel.__name__, constants, made.metadata.shared, *_resources(made)))
        return made

    before = driver._active
    driver.set_active(_Driver(capability))  # type: ignore[arg-type]
    JITFunction.run = compile_only  # type: ignore[method-assign]
    try:
        yield compiled
    finally:
        JITFunction.run = run  # type: ignore[method-assign]
        driver._active = before


def _resources(made: Any) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])
