"""Admission by itself: ranks, the settings that must agree, and members beside experts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.membership.admission import AGREED, crowd_for, problem_with
from coordinator.messages import Balancing, Settings
from tests.coordinator.membership.test_registry import EXPERTS, SETTINGS, register

MAY_DIFFER = {
    "model",
    "revision",
    "num_experts",
    "max_num_batched_tokens",
    "is_budget_given",
    "max_num_seqs",
    "performance_mode",
}
"""Settings that decide neither an answer's bits nor what instances exchange, or follow from others."""
MUST_AGREE = [each.name for each in msgspec.structs.fields(Settings) if each.name not in MAY_DIFFER]


def other_than(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case tuple():
            return (*value, "other")
        case None:
            return Balancing(window_size=10, windows=2)
        case _:
            return f"other {value}"


@pytest.mark.parametrize("name", MUST_AGREE)
def test_an_instance_that_differs_in_a_setting_is_refused_by_its_name(name: str) -> None:
    ours = msgspec.structs.replace(
        SETTINGS, enable_expert_parallel=True
    )  # some matter to spread experts alone
    theirs = msgspec.structs.replace(ours, **{name: other_than(getattr(ours, name))})
    problem = problem_with(register("b", size=2, settings=theirs), 2, ours, {0})
    assert problem is not None
    assert AGREED[name] in problem


def test_ranks_end_before_the_size() -> None:
    assert problem_with(register("a", 1, size=2), 2, SETTINGS, ()) is None
    problem = problem_with(register("a", 2, size=2), 2, SETTINGS, ())
    assert problem == "rank 2 is out of range: with -dp 2 ranks are 0 to 1"


def test_an_instance_in_the_place_of_another_is_none_more_than_there_are_experts() -> None:
    settings = msgspec.structs.replace(EXPERTS, num_experts=3)
    assert crowd_for(register("a", 1), settings, {0, 1, 2}) is None
    assert crowd_for(register("a", None), settings, {0, 1, 2}) is not None
    assert crowd_for(register("a", None), settings, {0, 1}) is None
