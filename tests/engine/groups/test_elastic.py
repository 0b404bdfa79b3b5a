"""The threads around :class:`engine.groups.recovery.Recovery`, without a coordinator.

Instances are threads, and the coordinator's messages are written by hand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from coordinator.messages import Evidence, GroupPlan, Lost, Peer
from engine.groups.elastic import Elastic
from engine.groups.preparation import Preparations
from engine.groups.recovery import AwaitGroup, LeaveMesh
from engine.groups.stepping import NoGroup
from engine.model.checkpoint import ReadingStopped
from parallel.communicators.base import CollectiveError, Communicator
from parallel.links.counts import LinkCount
from parallel.placement import Placement, assign_experts, held_by_rank
from tests.parallel.thread_group import ThreadCommunicator, thread_group
from tests.waiting import until

pytestmark = pytest.mark.mesh

PATIENCE = 10.0
NUM_EXPERTS = 6


def form(
    epoch: int, *names: str, leavers: tuple[str, ...] = (), broken: int = 0, weights: int = 0
) -> GroupPlan:
    """Group of some of a, b, c, whose rank is their place in the alphabet."""
    return GroupPlan(
        epoch=epoch,
        store="",
        peers=[
            Peer(rank=ord(name) - ord("a"), address=f"inproc://{name}", host="h", instance=name)
            for name in names
        ],
        owners=assign_experts(NUM_EXPERTS, len(names)).owners if names else (),
        leavers=leavers,
        broken=broken,
        weights=weights,
    )


class Meeting:
    """Rendezvous of threads: a group is formed for each epoch once all have come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, list[ThreadCommunicator]] = {}
        self._here: dict[int, int] = {}

    def connect(self, name: str, form: GroupPlan, should_stop: Callable[[], bool]) -> Communicator:
        with self._lock:
            group = self._groups.setdefault(form.epoch, thread_group(len(form.peers)))
            self._here[form.epoch] = self._here.get(form.epoch, 0) + 1
        while self._here[form.epoch] < len(form.peers):
            if should_stop():
                raise CollectiveError("stopped", None, "aborted")
            time.sleep(0.001)
        return group[[peer.instance for peer in form.peers].index(name)]


class Weights:
    """The part of an executor that holds experts."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.finishes = threading.Event()
        self.joined: list[tuple[int, Placement]] = []
        self.is_slow = False
        self.prepared_number = 0
        """The newest weight version that is prepared."""
        self.entered: list[tuple[int, int]] = []
        """Weight versions that were entered, and how many groups had been joined before."""

    def prepare(self, form: GroupPlan, place: int, free_bytes: int, should_stop: Callable[[], bool]) -> int:
        is_slow, self.is_slow = self.is_slow, False
        while is_slow and not self.finishes.is_set():
            if should_stop():
                raise ReadingStopped
            time.sleep(0.001)
        return len(set(held_by_rank(form.placement, form.ranks, place)[0][0]) - set(self.held))

    def join(self, group: Communicator, placement: Placement) -> None:
        self.held = placement.experts_of(group.rank)
        self.joined.append((group.size, placement))

    def await_weights(self, number: int, should_stop: Callable[[], bool]) -> None:
        while number > self.prepared_number:
            if should_stop():
                raise ReadingStopped
            time.sleep(0.001)

    def enter(self, number: int) -> None:
        self.entered.append((number, len(self.joined)))

    def link_counts(self) -> list[LinkCount]:
        """Nothing is counted: members are threads."""
        return []


class Instance:
    """A step loop in a thread, without requests of its own unless :attr:`tokens` says so."""

    def __init__(self, name: str, meeting: Meeting) -> None:
        self.name = name
        self.weights = Weights()
        self.reports: list[Lost] = []
        self.entered_epochs: list[int] = []
        self.phases: list[str] = []
        self.tokens = 0
        self.steps = 0
        self.fenced = 0
        self.ended = False
        self.error: NoGroup | None = None
        self.leaves = False
        self.pauses = threading.Event()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self.preparations: Preparations[Communicator] = Preparations(
            name,
            self.weights,  # type: ignore[arg-type]
            lambda form, should_stop: meeting.connect(name, form, should_stop),
            lambda: 0,
            self.weights,
        )
        self.elastic = Elastic(
            name,
            self.weights,  # type: ignore[arg-type]
            self,
            self.preparations,
            wake_loop=self._wake.set,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    # what the mesh gets

    def report(self, lost: Lost) -> None:
        self.reports.append(lost)

    def entered(self, form: GroupPlan) -> None:
        self.entered_epochs.append(form.epoch)

    def changed(self) -> None:
        return

    def waits(self) -> None:
        self.phases.append("waits")

    def drained(self) -> None:
        self.phases.append("drained")

    # the loop

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.fenced += self.elastic.is_fenced()
                turn = self.elastic.turn()
                if isinstance(turn, LeaveMesh):
                    self.ended = True
                    return
                if self.leaves:
                    self.elastic.drained()
                if isinstance(turn, AwaitGroup) or not (self.tokens or self.elastic.must_step):
                    self._wake.wait(0.02)
                    self._wake.clear()
                    continue
                if self.tokens:
                    self.elastic.notice_work()
                while self.pauses.is_set():
                    time.sleep(0.001)
                try:
                    self.steps += self.elastic.agree(self.tokens, 0, 0).runs
                except CollectiveError as error:
                    self.elastic.failed(error)
        except NoGroup as error:
            self.error = error
        finally:
            self.elastic.close()

    def end(self) -> None:
        self._stop.set()
        self.pauses.clear()
        self._wake.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.fixture
def three() -> Iterator[list[Instance]]:
    meeting = Meeting()
    instances = [Instance(name, meeting) for name in "abc"]
    yield instances
    for instance in instances:  # the ones that wait in a collective come out when the first one aborts
        instance.elastic.on_fenced()
    for instance in instances:
        instance.end()


def work(*instances: Instance) -> None:
    """Give all members tokens in every step from now on.

    All get them, since no wakes are delivered here.
    """
    for instance in instances:
        instance.tokens = 1
        instance.elastic._wake_loop()


def tell(instances: list[Instance], form: GroupPlan) -> None:
    for instance in instances:
        instance.elastic.on_form(form)


def in_epoch(epoch: int, *instances: Instance) -> None:
    until(lambda: all(instance.entered_epochs[-1:] == [epoch] for instance in instances))


def test_they_enter_join_and_leave_by_agreement(three: list[Instance]) -> None:
    a, b, c = three
    tell([a, b], form(1, "a", "b"))
    in_epoch(1, a, b)
    assert (a.weights.held, b.weights.held) == ([0, 1, 2], [3, 4, 5])
    until(lambda: not a.elastic.must_step and not b.elastic.must_step)  # asleep
    tell(three, form(2, "a", "b", "c"))
    in_epoch(2, a, b, c)
    assert [instance.weights.held for instance in three] == [[0, 1], [2, 3], [4, 5]]
    work(a, b, c)
    until(lambda: c.steps > 10)
    b.tokens = 0
    b.leaves = True
    until(lambda: b.phases == ["waits", "drained"])
    tell(three, form(3, "a", "c", leavers=("b",)))
    in_epoch(3, a, c)
    until(lambda: b.ended)
    steps = a.steps
    until(lambda: a.steps > steps + 10)
    assert a.elastic.times.changes == 2
    assert a.elastic.times.recoveries == 0
    assert not any(instance.reports for instance in three)


def test_nobody_changes_before_all_are_ready(three: list[Instance]) -> None:
    a, b, c = three
    tell([a, b], form(1, "a", "b"))
    in_epoch(1, a, b)
    c.weights.is_slow = True
    work(a, b)
    tell(three, form(2, "a", "b", "c"))
    steps = a.steps
    until(lambda: a.steps > steps + 20)  # they serve meanwhile
    assert (a.entered_epochs, b.entered_epochs, c.entered_epochs) == ([1], [1], [])
    c.weights.finishes.set()
    in_epoch(2, a, b, c)


def test_other_weights_are_entered_by_all_at_once_once_all_have_them(three: list[Instance]) -> None:
    tell(three, form(1, "a", "b", "c"))
    in_epoch(1, *three)
    work(*three)
    for each in three[:2]:
        each.weights.prepared_number = 1
    tell(three, form(2, "a", "b", "c", weights=1))
    steps = three[0].steps
    until(lambda: three[0].steps > steps + 20)  # they serve meanwhile
    assert [each.weights.entered for each in three] == [[(0, 0)]] * 3
    three[2].weights.prepared_number = 1
    in_epoch(2, *three)
    assert [each.weights.entered for each in three] == [[(0, 0), (1, 1)]] * 3, "before the group is joined"


def test_a_loss_ends_a_waiting_collective_at_once(three: list[Instance]) -> None:
    a, b, c = three
    tell(three, form(1, "a", "b", "c"))
    in_epoch(1, a, b, c)
    work(a, b)
    c.pauses.set()  # it hangs: the others wait for its header
    time.sleep(0.05)
    began = time.monotonic()
    tell([a, b], form(2, "a", "b", broken=1))
    in_epoch(2, a, b)
    assert time.monotonic() - began < 1.0
    steps = a.steps
    until(lambda: a.steps > steps + 10)
    assert a.elastic.times.recoveries == 1
    assert a.weights.held == [0, 1, 2]
    c.elastic.on_fenced()
    c.pauses.clear()
    until(lambda: c.fenced == 1)
    tell(three, form(3, "a", "b", "c"))
    in_epoch(3, a, b, c)
    assert c.fenced == 1


def test_a_failed_collective_is_reported_once_and_waited_out(three: list[Instance]) -> None:
    a, b, c = three
    tell(three, form(1, "a", "b", "c"))
    in_epoch(1, a, b, c)
    until(lambda: not any(instance.elastic.must_step for instance in three))
    group = c.elastic._current.group  # type: ignore[union-attr]
    assert group is not None
    c.elastic._lost(c.elastic._current, [1], "exited", "its process", "rank 1 has died")  # type: ignore[arg-type]
    (lost,) = c.reports
    assert (lost.epoch, lost.suspects, lost.evidence) == (1, ("b",), Evidence.EXITED)
    until(lambda: c.phases == ["waits", "waits"])
    work(a)  # finds the group aborted
    until(lambda: a.reports)
    assert (a.reports[0].epoch, a.reports[0].evidence) == (1, Evidence.CLOSED)
    tell([a, c], form(2, "a", "c", broken=1))
    in_epoch(2, a, c)
    assert (len(a.reports), len(c.reports)) == (1, 1)


def test_a_newer_form_ends_the_preparation_of_an_older_one(three: list[Instance]) -> None:
    a, b, c = three
    a.weights.is_slow = True
    tell(three, form(1, "a", "b", "c"))
    until(lambda: not a.weights.is_slow)
    tell([a, b], form(2, "a", "b"))  # c died before the first group
    in_epoch(2, a, b)
    assert (a.entered_epochs, b.entered_epochs, c.entered_epochs) == ([2], [2], [])


def test_a_newcomer_that_can_be_in_no_group_ends(three: list[Instance]) -> None:
    a, *_ = three

    def connect(form: GroupPlan, should_stop: Callable[[], bool]) -> Communicator:
        raise ValueError("shared memory needs all instances on one host")

    a.preparations.connect = connect
    a.elastic.on_form(form(1, "a"))
    until(lambda: a.error is not None)
    assert "the group of epoch 1 cannot form: shared memory needs" in str(a.error)


def test_a_group_that_does_not_form_is_reported(three: list[Instance]) -> None:
    a, b, _ = three
    tell([a, b], form(1, "a", "b"))
    in_epoch(1, a, b)
    connect = a.preparations.connect

    def fail(form: GroupPlan, should_stop: Callable[[], bool]) -> Communicator:
        raise CollectiveError("rank 2 has died", 2, "exited")

    a.preparations.connect = fail
    tell(three, form(2, "a", "b", "c"))
    until(lambda: a.reports)
    assert (a.reports[0].epoch, a.reports[0].suspects) == (2, ("c",))
    a.preparations.connect = connect
    work(a, b)
    until(lambda: a.steps > 10)  # the group before goes on
    tell([a, b], form(3, "a", "b"))
    in_epoch(3, a, b)


@pytest.mark.parametrize("error", [MemoryError(), TypeError("nobody thought of it")])
def test_whatever_keeps_a_group_from_forming_is_reported(
    three: list[Instance], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    a, *_ = three

    def prepare(form: GroupPlan, place: int, free_bytes: int, should_stop: Callable[[], bool]) -> int:
        raise error

    a.weights.prepare = prepare
    a.elastic.on_form(form(1, "a"))
    until(lambda: a.reports)
    assert a.reports[0].epoch == 1
    assert f"the group of epoch 1 cannot form: {str(error) or 'MemoryError'}" in caplog.text
