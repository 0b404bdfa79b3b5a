"""``python -m engine.host.fork_server FD MODULE ...``: loads modules once, and forks processes that use them.

Asked over a socket pair, one :class:`engine.host.forked.Fork` at a time; the protocol and the reason for it
are in :mod:`engine.host.forked`. Runs no thread, opens nothing and computes nothing from input, so that what
it hands on is exactly loaded modules, with what they compute once. It ends with its asker.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

import msgspec

from coordinator.process import process
from engine.host import deferred, forked
from engine.host.forked import Born, Fork, ForkFailed, ForkServer

STICKY = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON", "HOME", "XDG_", "TZ"),
    *("TORCH", "PYTORCH_", "ATEN_", "CUDA_", "NVIDIA_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_"),
    *("LANG", "LC_"),
)
"""Prefixes of environment variables that libraries read when they are loaded."""
SET_LATER = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}

_loaded_with: dict[str, str] = {}
"""Environment in which the libraries were loaded."""


class ForkService:
    """Serves fork requests of one launcher over a socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def next_process(self) -> Fork | None:
        """Answer fork requests; returns the request in each child, None at the end.

        Returns in each new process as well: with what this one shall be.
        """
        while True:
            try:
                payload, received, _, _ = socket.recv_fds(
                    self._connection, forked.MAX_MESSAGE, forked.MAX_DESCRIPTORS
                )
            except ConnectionError:
                return None
            if not payload:
                return None
            try:
                request = msgspec.msgpack.decode(payload, type=Fork)
                if self._fork(request, received):
                    return request
            except (_Refused, OSError, msgspec.MsgspecError) as error:
                self._connection.send(msgspec.msgpack.encode(ForkFailed(str(error))))
            finally:
                for descriptor in received:
                    os.close(descriptor)

    def _fork(self, request: Fork, received: list[int]) -> bool:
        """Fork a child of the requesting process; True in the child."""
        _check_environment(request.environment)
        threads = os.listdir("/proc/self/task")
        if len(threads) != 1:
            raise _Refused(f"the fork server has {len(threads)} threads")
        _check_free(request.descriptors, {self._connection.fileno(), *received})
        begins, begin = os.pipe()
        told, tell = os.pipe()
        between = os.fork()
        if not between:
            try:
                if os.fork():
                    os._exit(0)
                os.close(begin)
                os.close(told)
                os.read(begins, 1)  # the one between has ended now: we are the asker's
                os.close(begins)
                above = fcntl.fcntl(tell, fcntl.F_DUPFD_CLOEXEC, max(2, *request.descriptors, *received) + 1)
                os.close(tell)
                self._become(request, received, above)
                os.write(above, b"%d" % os.getpid())
                os.close(above)
            except BaseException:  # noqa: BLE001 (this is no server; nothing above may go on)
                traceback.print_exc()
                os._exit(process.EXIT_FAILED)
            return True
        os.close(begins)
        os.close(tell)
        os.waitpid(between, 0)
        os.close(begin)
        with open(told, "rb") as answer:
            pid = answer.read()
        if not pid:
            raise _Refused("the new process did not become the asker's child")
        self._connection.send(msgspec.msgpack.encode(Born(int(pid))))
        return False

    def _become(self, request: Fork, received: list[int], above: int) -> None:
        """Give a forked child its environment, descriptors, title and working directory.

        No descriptor above the given one is in the way.
        """
        if os.getppid() != request.parent:
            os._exit(process.EXIT_FAILED)
        self._connection.close()
        os.setsid()
        os.environ.clear()
        os.environ.update(request.environment)
        process.die_with_parent()
        os.chdir(request.directory)
        sys.argv = [request.entry, *request.argv]
        _set_title(request.entry)
        numbers = [0, 1, 2, *request.descriptors]
        moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above + 1) for each in received]
        while received:
            os.close(received.pop())
        for number, each in zip(numbers, moved, strict=True):
            os.dup2(each, number)
            os.close(each)


class _Refused(Exception):
    pass


def _check_environment(wanted: dict[str, str]) -> None:
    for name in sorted({*wanted, *_loaded_with}):
        if name.startswith(STICKY) and name not in SET_LATER and wanted.get(name) != _loaded_with.get(name):
            raise _Refused(f"{name} is not what the libraries were loaded with")


def _check_free(numbers: Sequence[int], known: set[int]) -> None:
    """Refuse descriptor numbers that some library in this process already uses."""
    for number in set(numbers) - known:
        with contextlib.suppress(OSError):
            os.fstat(number)
            raise _Refused(f"descriptor {number} is in use")


def main() -> int:
    process.die_with_parent()
    _set_title("ForkServer")
    _loaded_with.update(os.environ)  # before: some libraries add to it
    deferred.trim()
    with deferred.no_garbage():  # and what is loaded stays shared: nobody writes to it
        for name in sys.argv[2:]:
            with contextlib.suppress(ModuleNotFoundError):  # the process that needs it says so better
                importlib.import_module(name)
        _compile_patterns()
    return serve(socket.socket(fileno=int(sys.argv[1])))


def _compile_patterns() -> None:
    """Compile the thousand patterns of weights' names that every process with a model needs."""
    with contextlib.suppress(Exception):  # a version that has them elsewhere: each process does it then
        sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("")


def serve(connection: socket.socket) -> int:
    """Run the fork server, or in a child its program; returns the exit status."""
    request = ForkService(connection).next_process()
    while request is not None and request.branches:
        request = _branch(request)
    return 0 if request is None else _run(request)


def _branch(request: Fork) -> Fork | None:
    """Split off a fork server for this process, before it has anything of its own.

    In that server, the next process that it makes.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        forked.inherited = ForkServer(ours, forked.Forked(pid), sys.modules)
        return msgspec.structs.replace(request, branches=False)
    ours.close()
    for descriptor in request.descriptors:
        os.close(descriptor)
    os.environ[process.PARENT_VARIABLE] = str(parent)
    process.die_with_parent()
    _set_title("ForkServer")
    return ForkService(theirs).next_process()


def _run(request: Fork) -> int:
    module, _, function = request.entry.partition(":")
    run = getattr(importlib.import_module(module), function)
    threads = request.environment.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdecimal():
        sys.modules["torch"].set_num_threads(max(1, int(threads)))
    try:
        return int(run() or 0)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return process.EXIT_FAILED
        return int(error.code or 0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 (what the interpreter would do)
        traceback.print_exc()
        return process.EXIT_FAILED


def _set_title(role: str) -> None:
    process.set_title(role, os.environ.get(process.MESH_VARIABLE, ""))


if __name__ == "__main__":
    import engine.host.fork_server

    process.finish(engine.host.fork_server.main())
