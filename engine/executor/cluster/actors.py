"""Ray actors: of a worker, in a thread, and of an instance, a child process.

Calls carry bytes only. An actor lives and dies with what it is for, and with the program that made it (Ray
ends the actors of a program that ends).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import ray

from coordinator.process import process
from engine.executor.channel import Channel, ChannelClosed
from engine.executor.cluster.messages import InstanceProgress, Place, PlaceQuery, StartInstance
from engine.executor.local_model import begin_of, find_copy, with_own
from engine.host.versions import versions
from engine.model.checkpoint import CheckpointError, ModelInfo, read_model_info
from parallel.rounds.segments import this_host

LISTEN_SECONDS = 1.0
"""Seconds that a call waits for a message."""
LAST_LINES_SECONDS = 0.5
"""Seconds to read the last output of an instance that has ended."""
MOST_LINES = 10_000
"""Most lines of an instance's output that are kept until they are fetched."""


def look(ask: bytes) -> bytes:
    """Answer a :class:`PlaceQuery` with a :class:`Place`."""
    wanted = msgspec.msgpack.decode(ask, type=PlaceQuery).model
    directory = found = problem = ""
    if wanted is not None:
        try:
            info, found = find_copy(wanted)
            directory = info.directory
        except CheckpointError as error:
            problem = str(error)
    place = Place(
        host=socket.gethostname(),
        address=ray.util.get_node_ip_address(),
        pid=os.getpid(),
        boot=this_host(),
        versions=versions(),
        directory=directory,
        fingerprint=found,
        problem=problem,
    )
    return msgspec.msgpack.encode(place)


class WorkerActor:
    """Ray actor that computes as one worker.

    ``tell`` and ``listen`` have a thread each, so calls of either keep their order.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._theirs = Channel(theirs)
        self._info: ModelInfo | None = None
        self._status: int | None = None
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.pop(process.PARENT_VARIABLE, None)  # of a shell that started the node, perhaps

    @ray.method(concurrency_group="tell")  # type: ignore[untyped-decorator]
    def look(self, ask: bytes) -> bytes:
        answer = look(ask)
        directory = msgspec.msgpack.decode(answer, type=Place).directory
        if directory:
            wanted = msgspec.msgpack.decode(ask, type=PlaceQuery).model
            assert wanted is not None
            self._info = read_model_info(Path(directory), weights=wanted.reads_weights)
        return answer

    @ray.method(concurrency_group="tell")  # type: ignore[untyped-decorator]
    def begin(self, payload: bytes) -> None:
        """Send the worker its first message, with this node's own facts put in."""
        begin = begin_of(payload)
        assert self._info is not None
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[variable] = str(begin.threads)  # before torch is loaded
        self._channel.send_timeout = begin.config.device.step_timeout
        self._channel.send(with_own(begin, self._info))
        threading.Thread(target=self._work, name="worker", daemon=True).start()

    @ray.method(concurrency_group="tell")  # type: ignore[untyped-decorator]
    def tell(self, payload: bytes) -> None:
        self._channel.send(payload)

    @ray.method(concurrency_group="listen")  # type: ignore[untyped-decorator]
    def listen(self) -> list[bytes]:
        """Messages of the worker; none if it sends none for ``LISTEN_SECONDS``."""
        said: list[bytes] = []
        try:
            if not self._channel.wait(LISTEN_SECONDS):
                return []
            while (payload := self._channel.take()) is not None:
                said.append(payload)
        except ChannelClosed:
            if not said:
                os._exit(self._status or 0)  # the engine has heard all, and learns of this end from Ray
        return said

    def _work(self) -> None:
        from engine.executor.worker import Worker

        try:
            Worker(self._theirs).run()
        except ChannelClosed:
            self._status = 0
        except Exception:  # noqa: BLE001 (said already, to the engine and in the log)
            self._status = 1
        finally:
            self._theirs.close()


class InstanceActor:
    """Ray actor that runs one instance, ``python -m engine``, as its child."""

    def __init__(self) -> None:
        self._output: deque[bytes] = deque(maxlen=MOST_LINES)
        self._child: subprocess.Popen[bytes] | None = None
        self._news = threading.Event()
        self._status: int | None = None

    @ray.method(concurrency_group="tell")  # type: ignore[untyped-decorator]
    def look(self, ask: bytes) -> bytes:
        return look(ask)

    @ray.method(concurrency_group="tell")  # type: ignore[untyped-decorator]
    def run(self, payload: bytes) -> None:
        """Start the instance of a :class:`StartInstance`."""
        run = msgspec.msgpack.decode(payload, type=StartInstance)
        threading.Thread(target=self._run, args=(run,), name="instance", daemon=True).start()

    @ray.method(concurrency_group="tell")  # type: ignore[untyped-decorator]
    def signal(self, number: int) -> None:
        """Pass on a signal of the launcher."""
        if self._child is not None:
            self._child.send_signal(number)

    @ray.method(concurrency_group="listen")  # type: ignore[untyped-decorator]
    def listen(self) -> bytes:
        """A :class:`InstanceProgress`, as soon as there is news."""
        self._news.wait(LISTEN_SECONDS)
        self._news.clear()
        status = self._status  # before its output, of which there is no more then
        lines = [self._output.popleft() for _ in range(len(self._output))]
        return msgspec.msgpack.encode(InstanceProgress(output=b"".join(lines), status=status))

    def _run(self, run: StartInstance) -> None:
        """Run the child in a thread that lives as long as the child.

        The kernel kills the child at the end of the thread that started it, so with this process, too.
        """
        environment = {**os.environ, **run.environment, process.PARENT_VARIABLE: str(os.getpid())}
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine", *run.argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, args=(self._child,), name="output", daemon=True)
        reader.start()
        status = self._child.wait()
        reader.join(LAST_LINES_SECONDS)  # its own children may hold the pipe open for longer
        self._status = status
        self._news.set()

    def _read(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self._output.append(line)
            self._news.set()


def worker_actor(**options: Any) -> Any:
    """The class of a worker's actor for Ray, with what it needs of a node."""
    return _of_ray(WorkerActor, options)


def instance_actor(**options: Any) -> Any:
    """The class of an instance's actor for Ray, with what it needs of a node."""
    return _of_ray(InstanceActor, options)


def _of_ray(actor: type, options: dict[str, Any]) -> Any:
    groups = {"tell": 1, "listen": 1}
    return ray.remote(concurrency_groups=groups, max_restarts=0, **options)(actor)
