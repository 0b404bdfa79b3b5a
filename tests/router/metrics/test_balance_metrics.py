"""Metrics of the balance of experts."""

from __future__ import annotations

from coordinator.messages import ExpertBalance
from router.metrics.balance_metrics import LastChange, balance_metrics


def test_a_change_is_as_old_as_the_look_that_saw_it() -> None:
    last = LastChange()
    looks = [(0, 10.0), (0, 15.0), (2, 20.0), (2, 21.5), (0, 30.0), (0, 31.0)]
    assert [last.look(*each) for each in looks] == [0.0, 5.0, 0.0, 1.5, 0.0, 1.0]


def test_what_moved_is_counted_in_copies_bytes_and_seconds() -> None:
    balance = ExpertBalance(changes=2, moves=9, moved_bytes=9000, seconds=0.75, held={0: 5, 1: 4})
    families = list(balance_metrics(balance, 12.5))
    assert len({family.name for family in families}) == len(families)
    found = {
        sample.name: sample.value for family in families for sample in family.samples if not sample.labels
    }
    assert found["lockstep:eplb_rebalancings_total"] == 2
    assert found["lockstep:eplb_moves_total"] == 9
    assert found["lockstep:eplb_moved_bytes_total"] == 9000
    assert found["lockstep:eplb_rebalancing_seconds_total"] == 0.75
    assert found["lockstep:eplb_seconds_since_rebalancing"] == 12.5
    assert found["lockstep:eplb_failing"] == 0


def test_copies_are_told_by_instance_and_by_expert_and_failures_by_a_gauge() -> None:
    balance = ExpertBalance(held={0: 5, 1: 4}, replicas=(2, 4, 3), is_failing=True)
    found = {
        (sample.name, *sample.labels.items()): sample.value
        for family in balance_metrics(balance, 0.0)
        for sample in family.samples
    }
    assert found["lockstep:eplb_copies", ("rank", "1")] == 4
    assert [found["lockstep:eplb_expert_copies", ("expert", str(number))] for number in range(3)] == [2, 4, 3]
    assert found["lockstep:eplb_failing",] == 1
