"""Measuring collectives: all members make the same calls, and what is counted as sent."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from parallel import measure
from parallel.communicators.base import CollectiveError
from tests.parallel.thread_group import ThreadCommunicator, thread_group


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("collective", measure.COLLECTIVES)
def test_every_member_gets_a_time(size: int, collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of calls that the members propose differ.

    A member that made more would wait for ever.
    """
    monkeypatch.setattr(measure, "SECONDS", 0.02)
    times: dict[int, float] = {}

    def member(group: ThreadCommunicator) -> None:
        times[group.rank] = measure.measure(group, collective, 400)
        group.all_gather_ints([group.rank])  # nobody is left behind in a call

    threads = [threading.Thread(target=member, args=(group,)) for group in thread_group(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(times) == list(range(size))
    assert all(0 < seconds < 10 for seconds in times.values())


class Alone:
    """A group of one that counts calls and reports another member's time for its share."""

    rank, size = 0, 1

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls = 0

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return [list(row), [int(self.seconds * 1e9)]]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return tensor


@pytest.mark.parametrize(
    ("seconds", "calls"),
    [(60.0, measure.FEWEST), (0.0, measure.MOST), (measure.SECONDS / 1.5, 2 * measure.FEWEST)],
    ids=["slow", "fast", "between"],
)
def test_the_slowest_member_says_when_it_is_enough(
    seconds: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_seconds", lambda call: call() is None)  # own calls take no time
    group = Alone(seconds)
    measure.measure(group, "all_reduce", 64)  # type: ignore[arg-type]
    assert group.calls == measure.WARM_UP + calls


def test_a_lost_member_is_an_error() -> None:
    group = thread_group(2)[0]
    group.abort()
    with pytest.raises(CollectiveError):
        measure.measure(group, "all_gather", 64)


@pytest.mark.parametrize(
    ("collective", "size", "sent"),
    [("all_reduce", 2, 100), ("all_gather", 2, 100), ("all_to_all", 2, 50), ("all_reduce", 4, 150), ("all_gather", 4, 300), ("all_to_all", 4, 75)],
)  # fmt: skip
def test_bytes_sent(collective: str, size: int, sent: float) -> None:
    assert measure.bytes_sent(collective, 100, size) == sent
