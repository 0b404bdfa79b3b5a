"""Preparation of an epoch in the background: read missing experts, form the group."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from safetensors import SafetensorError

from coordinator.messages import GroupPlan
from engine.groups.recovery import names
from engine.host.background import beside_steps
from engine.model.checkpoint import ReadingStopped

if TYPE_CHECKING:
    from engine.executor_contract import SpreadExecutor


class Closable(Protocol):
    """Interface of a group, or of several in one."""

    def abort(self) -> None: ...

    def close(self) -> None: ...


class GroupWeights(Protocol):
    """Interface of an instance's weights, whose version is that of its group."""

    def await_weights(self, number: int, should_stop: Callable[[], bool]) -> None:
        """Wait until this version is prepared or in use, in a background thread.

        Raises:
            engine.model.checkpoint.ReadingStopped: ``should_stop`` returned True.
            RuntimeError: a later one is in use.
        """
        ...

    def enter(self, number: int) -> None:
        """Use this version from the next step on, in the step thread."""
        ...


Group = TypeVar("Group", bound=Closable)

logger = logging.getLogger(__name__)

FORESEEN = (RuntimeError, ValueError, KeyError, OSError, MemoryError, SafetensorError)
"""Errors that a file, a peer or too little memory may cause."""
SETTLE = 0.05
"""Seconds from a group that is formed beside steps until it may be entered.

To form it takes some milliseconds, which are not to be in the step that ends with the change.
"""
LONG_READ = 0.5
"""Seconds of reading experts after which the log says what they were spent on."""

ReadExperts = Callable[[GroupPlan, Callable[[], bool]], int]
"""Function that reads the experts a plan assigns here; returns their number.

The callable says to stop.
"""
Connect = Callable[[GroupPlan, Callable[[], bool]], Group]
"""Form the group of a plan."""


class Preparation(Generic[Group]):
    """Background preparation of one :class:`coordinator.messages.GroupPlan`: reads experts, forms the group.

    :meth:`abandon` ends it soon; a thread that waits for a meeting place whose host is stopped
    stays behind, and disturbs nobody.
    """

    def __init__(
        self,
        form: GroupPlan,
        read_experts: ReadExperts,
        connect: Connect[Group],
        on_end: Callable[[Preparation[Group]], None],
        *,
        is_urgent: bool,
    ) -> None:
        """``on_end`` is called in the thread when the group is formed or cannot be (:attr:`error`).

        Not if the preparation was abandoned before. ``is_urgent``: there is no group to step in meanwhile.
        """
        self.form = form
        self.group: Group | None = None
        self.error: Exception | None = None
        self.num_read = 0
        self.read_at = self.formed_at = 0.0
        """time.monotonic() when the experts were read, and when the group was formed."""
        self._read_experts = read_experts
        self._connect = connect
        self._on_end = on_end
        self._is_urgent = is_urgent
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"epoch-{form.epoch}", daemon=True)

    def __repr__(self) -> str:
        state = "abandoned" if self._stopped.is_set() else "formed" if self.group is not None else "runs"
        return f"<Preparation of epoch {self.form.epoch}, {state}>"

    def start(self) -> None:
        self._thread.start()

    def abandon(self) -> None:
        """Cancel the preparation; a group already formed is aborted at once, then closed."""
        with self._lock:
            self._stopped.set()
            group, self.group = self.group, None
        if group is not None:
            group.abort()
            threading.Thread(target=group.close, name="closing", daemon=True).start()

    def _run(self) -> None:
        try:
            if self._is_urgent:
                self._read()
            else:
                beside_steps(self._read)
            group = self._connect(self.form, self._stopped.is_set)
            if not self._is_urgent:
                self._stopped.wait(SETTLE)
        except ReadingStopped:
            return
        except Exception as error:  # whatever it is, others wait for word of it
            if not isinstance(error, FORESEEN):
                logger.exception("epoch %d cannot be prepared", self.form.epoch)
            self.error = error
        else:
            self.formed_at = time.monotonic()
            with self._lock:
                if not self._stopped.is_set():
                    self.group = group
            if self.group is None:
                group.abort()
                group.close()
                return
        if not self._stopped.is_set():
            self._on_end(self)

    def _read(self) -> None:
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD)
        self.num_read = self._read_experts(self.form, self._stopped.is_set)
        self.read_at, after = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD)
        if self.read_at - began > LONG_READ:
            logger.info(
                "epoch %d: %d experts took %.1f s, of which %.1f s computing; %d page faults read the disk, "
                "the core was taken away %d times",
                self.form.epoch, self.num_read, self.read_at - began,
                after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
                after.ru_majflt - before.ru_majflt, after.ru_nivcsw - before.ru_nivcsw,
            )  # fmt: skip


class Preparations(Generic[Group]):
    """Epochs that one instance prepares, at most one of each number."""

    def __init__(
        self,
        instance: str,
        executor: SpreadExecutor,
        connect: Connect[Group],
        free_bytes: Callable[[], int],
        weights: GroupWeights,
    ) -> None:
        """``connect`` forms the group of a plan; ``free_bytes``: memory that more experts may use now."""
        self.weights = weights
        self._instance = instance
        self._executor = executor
        self.connect = connect
        self._free_bytes = free_bytes
        self._by_epoch: dict[int, Preparation[Group]] = {}

    def __repr__(self) -> str:
        return f"<Preparations {list(self._by_epoch.values())}>"

    def start(
        self, form: GroupPlan, on_end: Callable[[Preparation[Group]], None], *, is_urgent: bool
    ) -> None:
        """Begin to prepare the epoch of a plan; arguments as for :class:`Preparation`."""
        preparation = Preparation(form, self._read_experts, self.connect, on_end, is_urgent=is_urgent)
        self._by_epoch[form.epoch] = preparation
        preparation.start()

    def take(self, epoch: int) -> Preparation[Group]:
        """The finished preparation of an epoch that begins now."""
        return self._by_epoch.pop(epoch)

    def abandon(self, epoch: int) -> None:
        """Cancel the preparation of an epoch, if there is one."""
        preparation = self._by_epoch.pop(epoch, None)
        if preparation is not None:
            preparation.abandon()

    def close(self) -> None:
        """Cancel all preparations."""
        for epoch in list(self._by_epoch):
            self.abandon(epoch)

    def _read_experts(self, form: GroupPlan, should_stop: Callable[[], bool]) -> int:
        self.weights.await_weights(form.weights, should_stop)
        place = names(form).index(self._instance)
        return self._executor.prepare(form, place, self._free_bytes(), should_stop)
