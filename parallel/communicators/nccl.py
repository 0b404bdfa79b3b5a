"""A communicator between CUDA devices: torch's NCCL group, with deadlines of our own.

Calls with tensors of the device are launched and not waited for: what comes after them on the stream waits.
So nothing on the host notices a peer that does not come, and torch's own watchdog would end the process.
Ours (:class:`NcclWire`) aborts the group when a call, or a step that was watched, has not ended by its
deadline, or when a process of the group on this host has ended. What waits for the device then comes out.

Headers and tensors of the CPU go through another communicator of the same members, which also notices deaths
on other hosts. Tests let the same class compute over gloo, where calls do wait.

Nothing of this has run over NCCL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from parallel.communicators.base import CollectiveError, Communicator, Evidence
from parallel.communicators.gloo import MeetingStore
from parallel.communicators.process_group import Messages, ProcessGroupCommunicator, first_line
from parallel.links.meeting_contract import Meeting, Prefixed
from parallel.rounds.segments import ProcessWatch

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.005
"""Seconds between two looks at what is under way."""
DEATH_GRACE = 0.05
"""Seconds that a call may still take after the end of a member.

It may have left in order."""
END_SECONDS = 2.0
"""Seconds that an abort may take: NCCL's own has been seen to hang."""
STUCK_STATUS = 5
"""Exit status where an abort did not free the device, as of a hanging step."""
FOREVER = timedelta(days=1000)
QUIET_VARIABLES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
)
"""Environment variables that are set to 0: torch's watchdog would end the process."""


OFF_VARIABLE = "LOCKSTEP_NCCL"
"""Environment variable: with 0, tensors between devices travel through the host's memory."""


class _Pending:
    """A call, or a step, that must end by its deadline."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.peer: int | None = None
        """The member that is waited for, if it is known."""
        self.works: list[Any] = []
        self.is_launched = False

    def is_done(self) -> bool:
        return self.is_launched and all(work.is_completed() for work in self.works)


class NcclWire:
    """Sends and receives over NCCL, and the thread that aborts what is late.

    See :class:`parallel.communicators.process_group.Wire`.
    """

    def __init__(
        self,
        group: Any,
        *,
        processes: Mapping[int, int],
        end: Callable[[], None],
        shut_down: Callable[[], None],
        device: torch.device | None,
        on_stuck: Callable[[str], None] | None = None,
    ) -> None:
        """``group`` sends and receives as a process group of torch.

        Args:
            processes: of other members on this host, by rank.
            end: makes all fail that waits in the group.
            shut_down: leaves it in order.
            device: that of the tensors; None: of the CPU, whose calls wait.
            on_stuck: called with the reason of an abort that hangs; None: the process ends.
        """
        self._group = group
        self._end, self._shut_down = end, shut_down
        self._device = device
        self._on_stuck = on_stuck or _end_process
        self.reason: str | None = None
        self.blamed: int | None = None
        self.evidence: Evidence = "aborted"
        self.on_broken: Callable[[CollectiveError], None] | None = None
        self._asking = threading.Lock()
        self._processes = ProcessWatch()
        for rank, pid in processes.items():
            with contextlib.suppress(OSError):  # it has ended: calls will tell
                self._processes.add(rank, pid)
        self._lock = threading.RLock()  # abort may come from a signal handler
        self._in_group = threading.Lock()
        self._pending: list[_Pending] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._watcher = threading.Thread(target=self._watch, name="nccl-watch", daemon=True)
        self._watcher.start()

    def transfer(self, outgoing: Messages, incoming: Messages, seconds: float) -> RuntimeError | None:
        """See :class:`.Wire`. Tensors of a device are ready when the current stream comes to them."""
        received = [(peer, tensor) for peer, tensor in incoming if tensor.numel()]
        sent = [(peer, tensor) for peer, tensor in outgoing if tensor.numel()]
        if not received and not sent:
            return None
        with self._in_group:
            if self._device is not None and torch.cuda.is_current_stream_capturing():
                return self._launch(_Pending(seconds), sent, received)  # its replays are watched as steps
            with self._watched(seconds) as pending:
                error = self._launch(pending, sent, received)
                pending.is_launched = True
            return error

    def _launch(self, pending: _Pending, sent: Messages, received: Messages) -> RuntimeError | None:
        """Begin all, and let the stream wait for them; without a device, the caller does."""
        try:
            for peer, work in self._begin(sent, received):
                pending.peer = peer
                pending.works.append(work)
                work.wait()
        except RuntimeError as error:
            self._broke(pending.peer)
            return error.with_traceback(None)  # whose frames would keep the group
        return None

    def _begin(self, sent: Messages, received: Messages) -> list[tuple[int | None, Any]]:
        group = self._group
        if self._device is None:
            begun: list[tuple[int | None, Any]] = [
                (peer, group.recv([each], peer, 0)) for peer, each in received
            ]
            return begun + [(peer, group.send([each], peer, 0)) for peer, each in sent]
        group._start_coalescing(self._device)  # one launch, in which nobody waits for an order
        for peer, each in received:
            group.recv([each], peer, 0)
        for peer, each in sent:
            group.send([each], peer, 0)
        peers = {peer for peer, _ in [*sent, *received]}
        return [(peers.pop() if len(peers) == 1 else None, group._end_coalescing(self._device))]

    @contextlib.contextmanager
    def step(self, seconds: float) -> Iterator[None]:
        """Watch what is done meanwhile, such as the replay of a captured step."""
        with self._watched(seconds) as pending:
            try:
                yield
            finally:
                pending.is_launched = True

    @contextlib.contextmanager
    def _watched(self, seconds: float) -> Iterator[_Pending]:
        pending = _Pending(seconds)
        with self._changed:
            self._pending.append(pending)
            self._changed.notify()
        try:
            yield pending
        finally:
            if self._device is None or not pending.works:
                self._forget(pending)  # else when the device has done it

    def _forget(self, pending: _Pending) -> None:
        with self._changed:
            if pending in self._pending:
                self._pending.remove(pending)

    def cut(self, reason: str, blamed: int | None = None, evidence: Evidence = "aborted") -> None:
        """See :class:`.Wire`.

        Where the library's abort hangs, its kernels may hold the device's stream for good: whatever another
        group launched would wait behind them. So the process ends then, and is started again.
        """
        with self._lock:
            if self.reason is not None:
                return
            self.blamed, self.evidence, self.reason = blamed, evidence, reason
        if not _within(END_SECONDS, self._end) and self._device is not None:
            self._on_stuck(reason)

    def leave(self) -> None:
        """Wait for what was launched, leave the group in order, and end the thread."""
        deadline = time.monotonic() + END_SECONDS
        while self.reason is None and self._pending and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        is_whole = self.reason is None
        with self._lock:
            if is_whole:
                self.blamed, self.evidence, self.reason = None, "aborted", "it was closed"
        if is_whole and not _within(END_SECONDS, self._shut_down):
            _within(END_SECONDS, self._end)
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._watcher.join()
        self._processes.close()
        if self._in_group.acquire(timeout=END_SECONDS):
            self._group, self._end, self._shut_down = None, _nothing, _nothing  # which let go of the group
            self._in_group.release()

    def _broke(self, peer: int | None) -> None:
        """Handle an error of the library: a death, if there is one, explains it."""
        with self._lock:
            if self.reason is not None:
                return
            dead = self._dead(DEATH_GRACE)
        if dead:
            self.cut(f"rank {dead[0]} has died", dead[0], "exited")
        else:
            self.cut(f"the connection to rank {peer} broke", peer, "closed")

    def _dead(self, seconds: float) -> list[int]:
        """Members on this host whose processes have ended; two threads ask."""
        with self._asking:
            return self._processes.dead(seconds)

    # ---- in the thread that watches

    def _watch(self) -> None:
        _use(self._device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closed)
                if self._is_closed:
                    return
                pending = list(self._pending)
            for each in pending:
                if each.is_done():
                    self._forget(each)
            self._look([each for each in pending if each in self._pending])

    def _look(self, pending: Sequence[_Pending]) -> None:
        """Break the group if one of these is late, or waits for a dead member."""
        late = next((each for each in pending if time.monotonic() > each.deadline), None)
        if late is not None:
            who = "a member" if late.peer is None else f"rank {late.peer}"
            self._break(f"{who} did not come within {late.seconds:g} s", late.peer, "deadline")
        elif dead := self._dead(LOOK_SECONDS):
            time.sleep(DEATH_GRACE)
            if any(each in self._pending and not each.is_done() for each in pending):
                self._break(f"rank {dead[0]} has died", dead[0], "exited")

    def _break(self, reason: str, blamed: int | None, evidence: Evidence) -> None:
        was_whole = self.reason is None
        self.cut(reason, blamed, evidence)
        with self._changed:
            self._pending.clear()
        if was_whole and self.on_broken is not None:
            self.on_broken(CollectiveError(reason, blamed, evidence))


def _end_process(reason: str) -> None:
    """End this process at once: its device may be held for good."""
    logger.critical(
        "the abort of an NCCL group hangs (%s), and may hold the device: this process ends with status %d",
        reason,
        STUCK_STATUS,
    )
    logging.shutdown()
    os._exit(STUCK_STATUS)


def _nothing() -> None:
    """Stands for the end of a group that has ended."""


def _use(device: torch.device | None) -> None:
    """Make a device the current one of this thread.

    Else CUDA's calls make a context on the first one.
    """
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(device)


def _within(seconds: float, call: Callable[[], None]) -> bool:
    """Make a call in a thread; whether it has ended within so many seconds."""

    def quietly() -> None:
        with contextlib.suppress(RuntimeError):
            call()

    thread = threading.Thread(target=quietly, name="nccl-end", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


class NcclCommunicator(ProcessGroupCommunicator):
    """One member; see :class:`parallel.communicators.base.Communicator`. Carries tensors of its device."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        timeout: float,
        wire: NcclWire | None,
        device: torch.device,
        processes: Mapping[int, int],
        host: Communicator | None = None,
    ) -> None:
        """``host``: of the same members, for headers and tensors of the CPU.

        It is closed with this one."""
        super().__init__(rank, size, timeout)
        self.device = device
        self.processes = dict(processes)
        self.host = host
        self._nccl = wire
        if wire is None:
            return
        self.wire = wire
        self._leave_once = weakref.finalize(self, wire.leave)
        if host is not None:
            host.on_broken = self._host_broke

    def _host_broke(self, error: CollectiveError) -> None:
        assert self._nccl is not None
        self._nccl.cut(str(error), error.rank, error.evidence)
        if self._nccl.on_broken is not None:
            self._nccl.on_broken(error)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a step, which must end within the timeout.

        It is worth nothing if the group breaks in it.

        Raises:
            CollectiveError: the group is broken at its end.
        """
        if self._nccl is None:
            yield
            return
        with self._nccl.step(self._timeout):
            yield
        if self._reason is not None:
            raise self._error("a step")

    def _leave(self) -> None:
        self._leave_once()

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != self.device.type:
            raise ValueError(
                f"this communicator carries {self.device.type} tensors only, not {tensor.device}"
            )
        return tensor.detach().contiguous()

    def _numbers(self, row: Sequence[int]) -> torch.Tensor:
        return torch.tensor(row, dtype=torch.int64, device=self.device)

    # ---- the contract: what is on the CPU goes through the host

    def _by_host(self, tensor: torch.Tensor) -> Communicator | None:
        return self.host if self.host is not None and tensor.is_cpu else None

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return super().all_gather_ints(row) if self.host is None else self.host.all_gather_ints(row)

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        host = self._by_host(part)
        return super().all_gather(part, sizes) if host is None else host.all_gather(part, sizes)

    def all_gather_view(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        host = self._by_host(part)
        return super().all_gather_view(part, sizes) if host is None else host.all_gather_view(part, sizes)

    def reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        host = self._by_host(whole)
        return super().reduce_scatter(whole, sizes) if host is None else host.reduce_scatter(whole, sizes)

    def all_to_all(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        if (host := self._by_host(outgoing)) is not None:
            return host.all_to_all(outgoing, send_sizes, receive_sizes)
        return super().all_to_all(outgoing, send_sizes, receive_sizes)

    def all_to_all_views(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        if (host := self._by_host(outgoing)) is not None:
            return host.all_to_all_views(outgoing, send_sizes, receive_sizes)
        return super().all_to_all_views(outgoing, send_sizes, receive_sizes)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self._by_host(tensor)
        return super().all_reduce(tensor) if host is None else host.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        host = self._by_host(tensor)
        return super().broadcast(tensor, source) if host is None else host.broadcast(tensor, source)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        if (host := self._by_host(tensor)) is not None:
            host.send(tensor, to)
        else:
            super().send(tensor, to)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        host = self._by_host(like)
        return super().receive(like, source) if host is None else host.receive(like, source)

    def abort(self) -> None:
        super().abort()
        if self.host is not None:
            self.host.abort()

    def close(self) -> None:
        super().close()
        if self.host is not None:
            self.host.close()


def is_possible() -> bool:
    """Whether this process can be a member of a group over NCCL."""
    has_nccl = hasattr(torch.distributed, "ProcessGroupNCCL") and torch.cuda.is_available()
    return has_nccl and os.environ.get(OFF_VARIABLE) != "0"


def cuda_device(number: int) -> torch.device:
    return torch.device("cuda", number)


def connect(
    meeting: Meeting, host: Communicator, device: torch.device, *, timeout: float, name: str
) -> NcclCommunicator:
    """A communicator over NCCL for the members of ``host``.

    Each has a CUDA device of its own.

    Raises:
        CollectiveError: NCCL does not connect them in time.
    """
    distributed: Any = torch.distributed
    for variable in QUIET_VARIABLES:
        os.environ[variable] = "0"
    store = MeetingStore(Prefixed(meeting, f"nccl/{name}"), timeout)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    backend = distributed.ProcessGroupNCCL(store, host.rank, host.size, options)
    failures: list[Exception] = []

    def join() -> None:
        try:
            _use(device)
            backend.eager_connect_single_device(device)
        except RuntimeError as error:
            failures.append(error)

    if not _within(timeout, join) or failures:
        _within(END_SECONDS, backend.abort)
        why = first_line(failures[0]) if failures else f"NCCL has not connected them within {timeout:g} s"
        raise CollectiveError(f"connecting rank {host.rank} of {host.size}: {why}", None, "deadline")
    group = distributed.ProcessGroup(store, host.rank, host.size)
    group._set_default_backend(distributed.ProcessGroup.BackendType.NCCL)
    group._register_backend(device, distributed.ProcessGroup.BackendType.NCCL, backend)
    wire = NcclWire(
        group, processes=host.processes, end=backend.abort, shut_down=backend.shutdown, device=device
    )
    return NcclCommunicator(
        host.rank, host.size, timeout=timeout, wire=wire, device=device, processes=host.processes, host=host
    )
