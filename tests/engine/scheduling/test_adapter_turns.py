"""Turns of adapters: a long queue of one holds up no other."""

from __future__ import annotations

import random

import pytest

from engine.scheduling.adapter_turns import MOST_KNOWN, AdapterTurns


def order_of(arrivals: list[str], turns: AdapterTurns | None = None) -> list[str]:
    """Adapters of requests that all wait, in the order of their admission."""
    turns = turns or AdapterTurns()
    waiting = sorted((turns.take(adapter), number, adapter) for number, adapter in enumerate(arrivals))
    return [adapter for _, _, adapter in waiting]


def test_requests_of_one_adapter_are_in_the_order_of_their_arrival() -> None:
    turns = AdapterTurns()
    taken = [turns.take("a") for _ in range(5)]
    assert taken == sorted(set(taken))


def test_one_request_comes_before_the_queue_of_another_adapter() -> None:
    assert order_of(["a"] * 100 + ["b"]).index("b") == 1
    assert order_of(["a"] * 100 + ["", "b", "b"])[:5] == ["a", "", "b", "a", "b"]


def test_who_was_away_has_saved_no_turns() -> None:
    turns = AdapterTurns()
    for _ in range(50):
        turns.admitted(turns.take("a"))
    assert order_of(["a", "b", "a", "b", "a", "b"], turns)[:4].count("b") <= 3
    assert turns.take("c") >= 49


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_equal_while_queues_are_not_empty(seed: int) -> None:
    """Each of the adapters with waiting requests is admitted about as often as any other."""
    chance, turns = random.Random(seed), AdapterTurns()
    waiting: list[tuple[int, int, str]] = []
    for number in range(300):
        adapter = chance.choices("abc", (20, 5, 2))[0]
        waiting.append((turns.take(adapter), number, adapter))
    admitted: list[str] = []
    while all(any(each[2] == adapter for each in waiting) for adapter in "abc"):
        first = min(waiting)
        waiting.remove(first)
        turns.admitted(first[0])
        admitted.append(first[2])
    counts = [admitted.count(adapter) for adapter in "abc"]
    assert max(counts) - min(counts) <= 1


def test_what_is_remembered_has_a_limit() -> None:
    turns = AdapterTurns()
    for number in range(10 * MOST_KNOWN):
        turns.admitted(turns.take(f"{number}"))
        turns.admitted(turns.take("a"))
    assert len(turns._next) <= MOST_KNOWN + 2
