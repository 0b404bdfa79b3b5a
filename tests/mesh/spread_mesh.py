"""A mesh whose instances come and go, by default with spread experts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

from coordinator.messages import State
from coordinator.rpc import keys
from engine.config import SHIPPED_MODEL
from examples.benchmarks.links.netns import Namespace
from tests.mesh.harness import Command, Ports, serve, wait_until

FLAGS = ["--dtype", "float32", "--num-gpu-blocks-override", "600", "--max-num-seqs", "32"]


class SpreadMesh(Ports):
    """``serve -dp SIZE``, of which instances may be missing for a while."""

    def __init__(
        self,
        directory: Path,
        stack: contextlib.ExitStack,
        size: int = 3,
        *,
        apart: bool = False,
        backend: str = "auto",
        model: str = SHIPPED_MODEL,
        how: Sequence[str] = ("-ep",),
        flags: Sequence[str] = FLAGS,
        each: Sequence[str] = (),
        hosts: tuple[Namespace, Namespace] | None = None,
    ) -> None:
        """``stack`` ends all that is started; logs are in ``directory``.

        With ``apart`` each instance has a ``serve`` of its own, so that the head lives on whichever of them
        end. ``backend`` is ``--all2all-backend``; ``how`` and ``flags`` are for the head, which tells the
        others; ``each`` is for every instance. With ``hosts`` every second instance is on the other one, and the
        mesh has a key; this process runs on the first.
        """
        if hosts is None:
            super().__init__()
        else:
            keys.write(keys.generate(), key := directory / "mesh.key")
            super().__init__(hosts[0].address, key)
        self._prefixes = [hosts[1].prefix, []] if hosts is not None and apart else [[]]
        self.size = size
        position = list(flags).index("--num-gpu-blocks-override")
        self._each = [*flags[position : position + 2], *each]
        self._directory = directory
        self._stack = stack
        self.commands: list[Command] = []
        self._num_started = 0
        self._tracebacks: list[str] = []
        placed = ["-dp", str(size), *(["-dpl", "0"] if apart else [])]
        self._start(model, *placed, *how, "--all2all-backend", backend, *self.head(), *flags, *each)
        for _ in range(size if apart else 0):
            self.join_one()
        self.command.wait_for(f"{size} instances ready")

    @property
    def command(self) -> Command:
        """The head: coordinator, router and the first instances."""
        return self.commands[0]

    @property
    def log(self) -> str:
        return "".join(command.log for command in self.commands)

    def _start(self, *argv: str) -> Command:
        log = self._directory / f"log.{self._num_started}"
        is_head = self._num_started == 0
        prefix = [] if is_head else self._prefixes[self._num_started % len(self._prefixes)]
        self._num_started += 1
        command = self._stack.enter_context(serve(log, *argv, prefix=prefix))
        self.commands.append(command)
        return command

    def join_one(self, *argv: str) -> Command:
        """Start one more instance as on another machine: it knows only the mesh's address."""
        return self._start("--headless", *self.join(), *self._each, *argv)

    def forget_ended(self) -> None:
        """Drop commands that have ended, so that a long-running mesh does not collect them.

        Their tracebacks are kept for :meth:`tracebacks`.
        """
        for command in self.commands[1:]:
            if command.process.poll() is not None:
                self._tracebacks += _tracebacks(command)
                self.commands.remove(command)

    def ready(self) -> list[int]:
        """Ranks that serve."""
        return [member.rank for member in self.view().members if member.state is State.READY]

    def make_whole(self) -> None:
        """Start what is missing, and wait until all are there."""
        present = {member.rank for member in self.view().members}
        for rank in set(range(self.size)) - present:
            self.join_one("-dpr", str(rank))
        wait_until(lambda: self.ready() == list(range(self.size)), 90, "all instances are ready")

    def engine(self, rank: int) -> psutil.Process:
        """The process of an instance."""
        return psutil.Process(next(member.pid for member in self.view().members if member.rank == rank))

    def running(self, rank: int) -> int:
        """Requests that run on an instance, by its last heartbeat."""
        return next((m.load.running for m in self.view().members if m.rank == rank), 0)

    def tracebacks(self) -> list[str]:
        """What no log may have."""
        return self._tracebacks + [line for command in self.commands for line in _tracebacks(command)]


def _tracebacks(command: Command) -> list[str]:
    return [f"{command.log_file.name}: {line}" for line in command.log.splitlines() if "Traceback" in line]
