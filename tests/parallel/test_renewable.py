"""A group that takes the place of another under the layers that use it."""

from __future__ import annotations

import threading

import pytest
import torch

from parallel.communicators.base import CollectiveError
from parallel.communicators.renewable import RenewableCommunicator
from tests.parallel.thread_group import ThreadCommunicator, thread_group


class Broken(ThreadCommunicator):
    """A group of which a member has died."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise CollectiveError("rank 1 has died", 1, "exited")


def summed(group: RenewableCommunicator, value: float, results: dict[int, float]) -> None:
    results[group.rank] = float(group.all_reduce(torch.tensor([value])))


def test_calls_go_to_the_newest_group() -> None:
    ends = [RenewableCommunicator(member) for member in thread_group(2)]
    later = thread_group(2)
    before = [end.renew(member) for end, member in zip(ends, later, strict=True)]
    before[0].abort()  # for members that still wait in the one before
    results: dict[int, float] = {}
    threads = [
        threading.Thread(target=summed, args=(end, number + 1.0, results)) for number, end in enumerate(ends)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {0: 3.0, 1: 3.0}


@pytest.mark.parametrize(("blames", "rank"), [(True, 1), (False, None)])
def test_a_member_inside_an_instance_is_not_blamed(blames: bool, rank: int | None) -> None:
    (member, _) = thread_group(2)
    member.__class__ = Broken
    with pytest.raises(CollectiveError) as caught:
        RenewableCommunicator(member, blames=blames).all_reduce(torch.zeros(1))
    assert (caught.value.rank, caught.value.evidence) == (rank, "exited")
