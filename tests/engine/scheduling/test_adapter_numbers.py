"""Numbers of adapters, and the order in which requests get them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Submit
from engine.pieces.pool import PiecePool
from engine.sampling import SamplingParams
from engine.scheduling.adapter_numbers import AdapterNumbers
from engine.scheduling.request import Request, from_submit
from engine.scheduling.rules import SchedulerRules
from engine.scheduling.scheduler import Scheduler
from engine.step import StepResult


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60))
def test_running_adapters_have_numbers_of_their_own(most: int, wishes: list[tuple[str, bool]]) -> None:
    numbers = AdapterNumbers(most)
    running: list[tuple[str, int]] = []
    for digest, begins in wishes:
        if begins and numbers.has_room(digest):
            running.append((digest, numbers.take(digest)))
        elif not begins and running:
            numbers.give_back(running.pop(0)[0])
        assert {1, *(number for _, number in running)} <= {*range(1, most + 1)}
        assert (
            len(set(running)) == len({number for _, number in running}) == len({name for name, _ in running})
        )
        if not numbers.has_room("g"):
            assert len({name for name, _ in running}) == most


def test_the_adapter_longest_without_requests_gives_its_number_up() -> None:
    numbers = AdapterNumbers(2)
    first, second = numbers.take("a"), numbers.take("b")
    assert not numbers.has_room("c")
    assert numbers.has_room("")
    assert numbers.take("") == 0
    numbers.give_back("b")
    numbers.give_back("a")
    assert numbers.take("c") == second, "b has had no requests for longer"
    assert numbers.take("a") == first
    assert not numbers.has_room("b")


def request(number: int, adapter: str) -> Request:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    wanted = Submit(number, str(number), [1, 2, 3], params, seed=0, adapter=adapter)
    return from_submit(wanted, b"router", arrival=number, eos_ids=(), max_model_len=64)


def run(scheduler: Scheduler) -> list[list[tuple[int, str, int]]]:
    """Admissions of each step until none is left: number of the request, adapter, its number."""
    admitted = []
    while (step := scheduler.schedule()) is not None:
        names = {each.slot: each.key[1] for each in scheduler.queues.running}
        admitted.append([(names[each.slot], each.adapter_digest, each.adapter) for each in step.admits])
        scheduler.update(
            step, StepResult([None if row in step.partial else 7 for row in range(len(step.slots))])
        )
    return admitted


def test_who_waits_for_an_adapters_number_is_not_overtaken() -> None:
    rules = SchedulerRules(max_num_seqs=4, max_num_batched_tokens=64, block_size=16, max_loras=1)
    scheduler = Scheduler(rules, PiecePool(32))
    for number, adapter in enumerate(["a", "b", "a", "", "b"]):
        scheduler.add(request(number, adapter))
    admitted = run(scheduler)
    assert admitted[0] == [(0, "a", 1), (3, "", 0)], "the base needs no number, the second a waits behind b"
    order = [each[0] for step in admitted for each in step]
    assert order == [0, 3, 1, 2, 4]
    assert all(number <= 1 for step in admitted for _, _, number in step)


def test_a_long_queue_of_one_adapter_holds_up_no_other() -> None:
    rules = SchedulerRules(max_num_seqs=2, max_num_batched_tokens=64, block_size=16, max_loras=2)
    scheduler = Scheduler(rules, PiecePool(32))
    for number, adapter in enumerate([*["a"] * 20, "b", ""]):
        scheduler.add(request(number, adapter))
    order = [number for step in run(scheduler) for number, _, _ in step]
    assert order[:4] == [0, 20, 21, 1]
    assert order[4:] == list(range(2, 20))
