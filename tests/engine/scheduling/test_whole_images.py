"""Images that no step may cut: each gets its step, however many requests decode."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import BATCH_PRIORITY
from engine.prompt_images import PromptImage
from engine.scheduling.request import Request, Status
from engine.scheduling.step_budget import MOST_PUT_OFF
from tests.engine.scheduling.test_scheduler import Bench, tokens
from tests.engine.simulated_executor import expected_output
from tests.nightly import examples

BUDGET, SEQS = 16, 8


def bench_of(
    micro_batches: int = 1, seqs: int = SEQS, threshold: int = 0, block_size: int = 4, max_loras: int = 0
) -> Bench:
    return Bench(
        num_blocks=512,
        block_size=block_size,
        max_loras=max_loras,
        max_seqs=seqs,
        budget=BUDGET,
        micro_batches=micro_batches,
        images_are_whole=True,
        long_prefill_token_threshold=threshold,
    )


def add_seen(
    bench: Bench,
    seed: int,
    before: int,
    size: int,
    count: int = 1,
    most: int = 3,
    priority: int = 0,
    adapter: str = "",
) -> int:
    """A request with images of so many tokens, and text before each."""
    length = (before + size) * count + 2
    images = tuple(
        PromptImage(at, at + size, bytes([seed, at]) * 8) for at in range(before, length - 2, before + size)
    )
    return bench.add(tokens(seed, length), max_tokens=most, images=images, priority=priority, adapter=adapter)


def at_image(request: Request) -> bool:
    """Whether a running request's next token begins an image."""
    is_running = request.status is Status.RUNNING
    return is_running and any(each.first == request.num_computed for each in request.images)


def check_whole(bench: Bench, request: Request) -> None:
    for image in request.images:
        assert not image.first < request.num_computed < image.end, "an image is cut"


@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_decode_rows_put_an_image_off_no_longer_than_the_bound(before: int, micro_batches: int) -> None:
    bench = bench_of(micro_batches)
    for number in range(SEQS - 1):
        bench.add(tokens(number, 2), max_tokens=80)
    for _ in range(4):
        bench.step()
    seen = add_seen(bench, 40, before, size=12)
    for _ in range(2 * (MOST_PUT_OFF + 4)):
        bench.step()
        check_whole(bench, bench.requests[seen])
    assert bench.outputs[seen], "its image was put off again and again"
    bench.finish()
    for number, request in bench.requests.items():
        assert bench.outputs[number] == expected_output(
            request.token_ids[: request.num_prompt], request.num_output
        )


@pytest.mark.parametrize("before", [0, 4])
def test_one_that_went_first_hides_no_later_image(before: int) -> None:
    bench = bench_of()
    for number in range(SEQS - 2):
        bench.add(tokens(number, 2), max_tokens=80)
    for _ in range(4):
        bench.step()
    for seed in (40, 41):
        seen = add_seen(bench, seed, before, size=12, most=80)
        for _ in range(2 * (MOST_PUT_OFF + 4)):
            bench.step()
        assert bench.outputs[seen], "it waits for the end of the one before"
    bench.finish()


def test_an_image_that_is_looked_at_often_in_a_step_is_put_off_once() -> None:
    bench = bench_of(seqs=12, threshold=1)
    for number in range(6):
        bench.add(tokens(number, 2), max_tokens=80)
    for number in range(2):
        bench.add(tokens(20 + number, 90), priority=5)
    for _ in range(4):
        bench.step()
    seen = add_seen(bench, 40, before=0, size=12)  # it is looked at before each of the prompts
    counts = []
    while not bench.outputs[seen]:
        bench.step()
        counts.append(bench.requests[seen].num_put_off)
    assert counts[:MOST_PUT_OFF] == list(range(1, MOST_PUT_OFF + 1))
    assert len(counts) <= 2 * (MOST_PUT_OFF + 4)
    bench.finish()


def test_a_late_line_that_others_hold_puts_neither_decodes_nor_images_off() -> None:
    bench = bench_of(seqs=16)
    for number in range(6):
        bench.add(tokens(number, 2), max_tokens=80, priority=BATCH_PRIORITY)
    for _ in range(4):
        bench.step()
    line = add_seen(bench, 40, before=4, size=12, priority=BATCH_PRIORITY)
    while bench.requests[line].num_put_off < MOST_PUT_OFF:
        bench.step()
    others = [bench.add(tokens(50 + number, 2), max_tokens=90) for number in range(6)]
    bench.step()
    bench.step()
    assert bench.requests[line].num_put_off == MOST_PUT_OFF
    for seed in (60, 61, 62):
        bench.add(tokens(seed, 20), max_tokens=1)
        before = [len(bench.outputs[number]) for number in others]
        bench.step()
        assert [len(bench.outputs[number]) for number in others] == [count + 1 for count in before]
    seen = add_seen(bench, 41, before=0, size=12)
    for _ in range(2 * (MOST_PUT_OFF + 4)):
        bench.step()
    assert bench.outputs[seen], "the line goes first in vain"
    bench.finish()


@pytest.mark.parametrize("before", [0, 24])
def test_a_due_image_that_lacks_blocks_keeps_its_turn_and_what_is_computed(before: int) -> None:
    bench = bench_of(block_size=32)
    decodes = [bench.add(tokens(number, 2), max_tokens=40) for number in range(SEQS - 1)]
    for _ in range(4):
        bench.step()
    seen = bench.requests[number := add_seen(bench, 40, before, size=12)]
    while seen.num_put_off < MOST_PUT_OFF - 1:
        bench.step()
    taken = bench.pool.take(bench.pool.num_free)
    assert taken is not None
    for _ in range(4):  # due in the second of them; the decode rows need no further block
        had = [len(bench.outputs[each]) for each in decodes]
        bench.step()
        assert [len(bench.outputs[each]) for each in decodes] == [count + 1 for count in had]
        assert seen.num_computed == before, "it lost what was computed"
    bench.pool.release(taken)
    bench.step()
    assert seen.num_computed >= before + 12, "it lost its turn"
    bench.finish()
    assert bench.outputs[number] == expected_output(seen.token_ids[: seen.num_prompt], seen.num_output)


def test_the_text_before_a_due_image_that_is_preempted_goes_behind_decode_rows() -> None:
    bench = bench_of()
    decodes = [bench.add(tokens(number, 2), max_tokens=40) for number in range(SEQS - 1)]
    for _ in range(4):
        bench.step()
    seen = bench.requests[add_seen(bench, 40, before=24, size=12)]
    while seen.num_put_off < MOST_PUT_OFF:
        bench.step()
    bench.scheduler.queues.preempt(seen)
    had = [len(bench.outputs[each]) for each in decodes]
    bench.step()
    assert [len(bench.outputs[each]) for each in decodes] == [count + 1 for count in had]
    assert not bench.scheduler.budget.goes_first(seen)
    bench.finish()


def test_a_due_image_that_lacks_a_number_for_its_adapter_keeps_its_turn() -> None:
    bench = bench_of(max_loras=1)
    holder = bench.add(tokens(30, 2), max_tokens=40, adapter="one")
    for number in range(SEQS - 3):
        bench.add(tokens(number, 2), max_tokens=80)
    for _ in range(4):
        bench.step()
    lacks = add_seen(bench, 40, 0, size=12, adapter="other")
    late = add_seen(bench, 41, 0, size=12)
    for _ in range(MOST_PUT_OFF + 2):
        bench.step()
    assert bench.outputs[late], "it is hidden by one that lacks a number"
    assert not bench.outputs[lacks]
    while len(bench.outputs[holder]) < 40:
        bench.step()
    for _ in range(MOST_PUT_OFF + 2):
        bench.step()
    assert bench.outputs[lacks]
    bench.finish()


events = st.one_of(
    st.tuples(st.just("text"), st.integers(1, 30), st.integers(1, 60)),
    st.tuples(st.just("image"), st.integers(0, 6), st.integers(2, BUDGET)),
    st.tuples(st.just("images"), st.integers(0, 6), st.integers(2, BUDGET)),
    st.tuples(st.just("steps"), st.integers(1, 12), st.just(0)),
)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(events, min_size=4, max_size=40), st.sampled_from([1, 1, 2]))
def test_any_load_computes_each_image_within_a_bound(
    happened: list[tuple[str, int, int]], micro_batches: int
) -> None:
    bench = bench_of(micro_batches)
    waited: dict[int, int] = {}

    def step() -> None:
        bench.step()
        for number, request in bench.requests.items():
            check_whole(bench, request)
            is_there = at_image(request) and not request.num_in_flight
            waited[number] = waited.get(number, 0) + 1 if is_there else 0
            assert waited[number] <= (MOST_PUT_OFF + 2 * SEQS) * micro_batches, "an image starves"

    for index, (kind, first, second) in enumerate(happened):
        if kind == "text":
            bench.add(tokens(index, first), max_tokens=second)
        elif kind == "steps":
            for _ in range(first):
                step()
        else:
            add_seen(bench, index, first, second, count=1 + (kind == "images"))
    while bench.scheduler.queues.has_work:
        step()
    bench.finish()
    for number, request in bench.requests.items():
        prompt = request.token_ids[: request.num_prompt]
        assert bench.outputs[number] == expected_output(prompt, request.num_output)


def test_an_image_beyond_all_steps_is_refused() -> None:
    with pytest.raises(
        AssertionError, match="an image of 17 tokens is computed in one step, and steps have 16"
    ):
        add_seen(bench_of(), 1, 0, BUDGET + 1)
