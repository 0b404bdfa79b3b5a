from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.speculation import SpeculativeConfig
from engine.messages import BATCH_PRIORITY, FinishReason, Submit
from engine.pieces.pool import PiecePool
from engine.sampling import SamplingParams
from engine.scheduling.request import Request, Status, from_submit, stream_seed
from engine.scheduling.rules import SchedulerRules
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_budget import PROMPT_LOGPROBS_CHUNK
from engine.scheduling.step_making import admit_of
from engine.scheduling.waiting_queue import WaitingQueue
from engine.speculation.speculation import Speculation
from engine.step import Step
from tests.engine.oracle import Oracle
from tests.engine.simulated_executor import VOCAB, SimulatedExecutor, expected_output
from tests.nightly import examples

PEER = b"router"
EOS = VOCAB + 1  # never sampled


def guesses(right: float, most: int = 5, seed: int = 0) -> Oracle:
    """Draft tokens for the output of the simulated model."""
    return Oracle(expected_output, right, most, seed)


class Bench:
    """A scheduler with a simulated model behind it."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_seqs: int = 8,
        budget: int = 32,
        micro_batches: int = 1,
        speculation: Speculation | None = None,
        most_tokens: int | None = None,
        **rules: object,
    ) -> None:
        self.pool = PiecePool(num_blocks)
        self.scheduler = Scheduler(
            SchedulerRules(
                max_num_seqs=max_seqs,
                max_num_batched_tokens=budget,
                block_size=block_size,
                micro_batches=micro_batches,
                tells_tokens=micro_batches > 1,
                **rules,  # type: ignore[arg-type]
            ),
            self.pool,
            speculation,
        )
        self.executor = SimulatedExecutor(
            block_size=block_size, budget=most_tokens or budget, max_rows=max_seqs, in_flight=micro_batches
        )
        self.under_way: deque[Step] = deque()
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self._arrivals = 0

    def add(self, prompt: list[int], max_tokens: int = 5, **fields: object) -> int:
        self._arrivals += 1
        params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
        submit = Submit(
            request=self._arrivals,
            request_id=f"r{self._arrivals}",
            prompt_ids=prompt,
            params=params,  # type: ignore[arg-type]
            seed=0,
            **fields,  # type: ignore[arg-type]
        )
        request = from_submit(submit, PEER, arrival=self._arrivals, eos_ids=(EOS,), max_model_len=10_000)
        assert self.scheduler.problem_with(request) is None
        self.scheduler.add(request)
        self.requests[self._arrivals] = request
        self.outputs[self._arrivals] = []
        return self._arrivals

    def step(self) -> int:
        """Let as many steps begin as may, and finish the oldest.

        The number of its tokens, 0 if none ran.
        """
        while len(self.under_way) < self.executor.in_flight and (step := self.scheduler.schedule()):
            self.executor.begin(step)
            self.under_way.append(step)
        if not self.under_way:
            return 0
        step = self.under_way.popleft()
        for outcome in self.scheduler.update(step, self.executor.finish()):
            self.outputs[outcome.request.key[1]] += outcome.token_ids
        return step.num_tokens

    def finish(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.queues.has_work:
                break
            assert self.step() > 0, f"stuck: {self.scheduler!r}"
        while self.under_way:  # of requests that were aborted
            self.step()
        assert not self.scheduler.queues.has_work
        assert self.pool.num_used == 0
        assert len(self.scheduler.queues.running) == len(self.scheduler.queues.waiting) == 0
        assert self.scheduler.queues.num_waiting_tokens == 0


def tokens(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB) for i in range(count)]


def test_a_request_runs_to_its_length() -> None:
    bench = Bench()
    number = bench.add(tokens(1, 10), max_tokens=6)
    bench.finish()
    assert bench.outputs[number] == expected_output(tokens(1, 10), 6)
    assert bench.requests[number].finish_reason is FinishReason.LENGTH


def test_decodes_come_before_a_long_prompt() -> None:
    bench = Bench(budget=8)
    short = [bench.add(tokens(seed, 3)) for seed in range(2)]
    bench.step()
    bench.add(tokens(9, 40))
    for _ in range(3):
        before = [len(bench.outputs[number]) for number in short]
        assert bench.step() == 8
        assert [len(bench.outputs[number]) for number in short] == [count + 1 for count in before]
    bench.finish()


def test_a_long_prompt_is_split_and_gives_the_same() -> None:
    prompt = tokens(3, 100)
    outputs = []
    for budget in (7, 32, 200):
        bench = Bench(budget=budget)
        number = bench.add(prompt, max_tokens=4)
        bench.finish()
        outputs.append(bench.outputs[number])
        assert bench.executor.num_steps == -(-100 // budget) + 3
    assert outputs == [expected_output(prompt, 4)] * 3


def test_the_last_crumbs_of_a_prompt_go_beyond_the_budget() -> None:
    """The last tokens of a prompt may exceed the budget.

    It is so where decode rows leave the budget a little too short for a prompt that would have fitted.
    """
    bench = Bench(budget=32)
    first = bench.add(tokens(1, 8), max_tokens=20)
    bench.step()
    second, third = (bench.add(tokens(seed, 33 if seed == 2 else 40), max_tokens=3) for seed in (2, 3))
    assert bench.step() == 1 + 33, "one more than it has room for, and the budget has one more for each 16"
    assert [len(bench.outputs[number]) for number in (first, second, third)] == [2, 1, 0]
    assert bench.step() == 32
    bench.finish()
    for seed, number, count in ((1, first, 20), (2, second, 3), (3, third, 3)):
        assert bench.outputs[number] == expected_output(
            tokens(seed, 33 if seed == 2 else 8 if seed == 1 else 40), count
        )


def test_those_that_decode_wait_for_few_tokens_of_prompts() -> None:
    """A prompt has a whole step only while nobody decodes."""
    bench = Bench(budget=32, prompt_tokens_beside_decodes=6)
    first = bench.add(tokens(1, 40), max_tokens=20)
    assert [bench.step() for _ in range(3)] == [32, 8, 1]
    second, third = (bench.add(tokens(seed, 16), max_tokens=3) for seed in (2, 3))
    assert [bench.step() for _ in range(3)] == [1 + 6, 1 + 6, 1 + 4 + 2]
    assert [len(bench.outputs[number]) for number in (first, second, third)] == [5, 1, 0]
    bench.finish()
    for seed, number, count in ((1, first, 20), (2, second, 3), (3, third, 3)):
        assert bench.outputs[number] == expected_output(tokens(seed, 40 if seed == 1 else 16), count)


def test_those_that_decode_in_other_steps_or_elsewhere_count_too() -> None:
    bench = Bench(budget=32, prompt_tokens_beside_decodes=6, micro_batches=2)
    bench.add(tokens(1, 4), max_tokens=20)
    bench.step()
    assert bench.scheduler.num_in_flight == 0
    bench.add(tokens(2, 30))
    step = bench.scheduler.schedule()
    assert step is not None
    assert step.counts == [1]
    step = bench.scheduler.schedule()
    assert step is not None
    assert step.counts == [6], "its one row is of a prompt, but a step beside it decodes"

    bench = Bench(budget=32, prompt_tokens_beside_decodes=6)
    bench.scheduler.budget.others_run = True  # those of another instance in the lockstep
    bench.add(tokens(1, 30))
    assert bench.step() == 6
    bench.scheduler.budget.others_run = False
    assert bench.step() == 24


def test_single_tokens_of_prompts_are_of_their_share_too() -> None:
    bench = Bench(budget=32, prompt_tokens_beside_decodes=7)
    bench.add(tokens(1, 4), max_tokens=20)
    bench.step()
    for seed, count in ((2, 6), (3, 20), (4, 20), (5, 20)):
        bench.add(tokens(seed, count))
    assert bench.step() == 1 + 6 + 1
    assert len(bench.scheduler.queues.running) == 3
    bench.finish()


def test_an_answer_that_has_begun_waits_for_no_share_of_a_step() -> None:
    """A migrated or preempted request: its client waits for the next token like others'."""
    bench = Bench(budget=32, prompt_tokens_beside_decodes=6)
    bench.add(tokens(1, 4), max_tokens=20)
    bench.step()
    moved = bench.add(tokens(2, 24), output_ids=expected_output(tokens(2, 24), 2))
    waits = bench.add(tokens(3, 24))
    assert bench.step() == 1 + 26
    assert [len(bench.outputs[number]) for number in (moved, waits)] == [1, 0]
    assert bench.step() == 2 + 6
    bench.finish()


def test_prompts_that_cannot_be_split_need_no_share() -> None:
    bench = Bench(budget=32, prompt_tokens_beside_decodes=6, enable_chunked_prefill=False)
    bench.add(tokens(1, 4), max_tokens=9)
    bench.step()
    bench.add(tokens(2, 20), max_tokens=3)
    assert bench.step() == 1 + 20
    bench.finish()


def test_a_known_prefix_is_not_computed_again() -> None:
    bench = Bench(budget=200)
    prompt = tokens(4, 40)
    bench.add(prompt)
    bench.finish()
    computed = bench.executor.computed_tokens
    again = bench.add(prompt)
    bench.finish()
    assert bench.executor.computed_tokens - computed == 4 + 4  # the last block of the prompt, 4 decodes
    assert bench.requests[again].num_cached == 36
    counters = bench.scheduler.counters()
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (80, 36)


def test_a_prompt_is_counted_with_the_first_token_of_its_request() -> None:
    bench = Bench(budget=16)
    prompt = tokens(4, 40)
    first = bench.add(prompt)
    bench.step()
    bench.step()
    counters = bench.scheduler.counters()
    assert (counters.prompt_tokens, counters.prefix_cache_queries) == (0, 0), "it may yet go elsewhere"
    bench.step()
    assert bench.scheduler.counters().prompt_tokens == 40
    bench.finish()
    resumed = bench.add(prompt, max_tokens=9, output_ids=bench.outputs[first])
    bench.finish()
    counters = bench.scheduler.counters()
    assert bench.requests[resumed].num_cached == 40, "its prompt came along"
    found = (counters.prompt_tokens, counters.prefix_cache_queries, counters.prefix_cache_hits)
    assert found == (40, 40, 0), "it was counted where its first token was given"
    left = bench.add(tokens(5, 40))
    bench.step()
    assert bench.scheduler.abort((PEER, left))
    bench.finish()
    assert bench.scheduler.counters().prompt_tokens == 40


def test_a_prompt_that_is_set_back_is_counted_once() -> None:
    bench = Bench(num_blocks=9, block_size=4, budget=64)
    prompts = [tokens(seed, 9) for seed in range(3)]
    for prompt in prompts:
        bench.add(prompt, max_tokens=12)
    bench.finish()
    counters = bench.scheduler.counters()
    assert counters.preemptions > 0
    assert counters.prompt_tokens == 27


def test_samples_of_one_prompt_share_it_within_a_step() -> None:
    bench = Bench(budget=200)
    prompt = tokens(5, 40)
    numbers = [bench.add(prompt, sample_index=index) for index in range(4)]
    assert bench.step() == 40 + 3 * 4
    bench.finish()
    assert [bench.outputs[number] for number in numbers] == [expected_output(prompt, 5)] * 4


def test_salts_keep_caches_apart() -> None:
    bench = Bench(budget=200)
    prompt = tokens(6, 40)
    bench.add(prompt, cache_salt="a")
    bench.finish()
    other = bench.add(prompt, cache_salt="b")
    bench.finish()
    assert bench.requests[other].num_cached == 0


def test_when_blocks_run_out_the_last_one_gives_way_and_loses_nothing() -> None:
    bench = Bench(num_blocks=12, block_size=4, budget=64)
    numbers = [bench.add(tokens(seed, 9), max_tokens=20) for seed in range(4)]
    bench.finish()
    assert bench.scheduler.counters().preemptions > 0
    for seed, number in enumerate(numbers):
        assert bench.outputs[number] == expected_output(tokens(seed, 9), 20)


def test_a_preempted_request_is_not_given_back() -> None:
    """It has begun: its router would send what its client has already."""
    bench = Bench(num_blocks=6, block_size=4)
    first, second = bench.add(tokens(1, 8), max_tokens=12), bench.add(tokens(2, 8), max_tokens=12)
    while bench.requests[second].status is not Status.WAITING or not bench.outputs[second]:
        assert bench.step()
    assert not bench.scheduler.recall((PEER, second))
    bench.finish()
    assert bench.outputs[second] == expected_output(tokens(2, 8), 12)
    assert bench.outputs[first] == expected_output(tokens(1, 8), 12)


def test_blocks_that_a_step_fills_in_part_are_being_filled() -> None:
    bench = Bench(block_size=4, budget=6)
    number = bench.add(tokens(1, 20))
    step = bench.scheduler.schedule()
    assert step is not None
    first, second, *_ = bench.requests[number].blocks
    assert bench.scheduler.blocks_being_filled() == {first, second}, "six tokens"
    bench.executor.begin(step)
    bench.scheduler.update(step, bench.executor.finish())
    assert bench.scheduler.blocks_being_filled() == set()
    bench.finish()


def test_what_an_aborted_request_would_have_cached_is_expected_no_more() -> None:
    bench = Bench(max_seqs=1)
    bench.add(tokens(1, 4), max_tokens=20)
    bench.step()
    waiting = bench.add(tokens(2, 17))
    bench.add(tokens(2, 17))
    assert bench.scheduler.queues.num_tokens_ahead == (34, 17 + 1), "the second finds what the first computes"
    assert bench.scheduler.abort((PEER, waiting))
    bench.add(tokens(2, 17))
    assert bench.scheduler.queues.num_tokens_ahead == (34, 1 + 17), "nobody computes it before this one"
    bench.finish()


def test_a_step_that_runs_again_brings_all_blocks_of_its_rows() -> None:
    """Workers may have forgotten what an earlier step brought."""
    bench = Bench(block_size=4)
    number = bench.add(tokens(1, 6))
    bench.step()
    step = bench.scheduler.schedule()
    assert step is not None
    assert step.new_blocks == {}
    (again,) = bench.scheduler.restart()
    assert again.new_blocks == {0: bench.requests[number].blocks}


def test_a_queue_counts_blocks_that_are_partly_filled() -> None:
    bench, queue = Bench(block_size=4), WaitingQueue(4)
    requests = [bench.requests[bench.add(tokens(seed, count))] for seed, count in ((1, 4), (2, 5))]
    for request in requests:
        queue.add(request)
    assert (len(queue), queue.num_blocks) == (2, 1 + 2)
    for request in requests:
        queue.remove(request)
    assert (len(queue), queue.num_blocks) == (0, 0)


def test_the_first_request_is_never_preempted() -> None:
    bench = Bench(num_blocks=10, block_size=4, budget=64)
    first = bench.add(tokens(0, 9), max_tokens=25)
    for seed in range(1, 4):
        bench.add(tokens(seed, 9), max_tokens=20)
    steps = 0
    while bench.requests[first].status is not Status.FINISHED:
        bench.step()
        steps += 1
    assert steps == 25


def test_abort_in_every_phase_frees_everything() -> None:
    for steps in range(12):
        bench = Bench(num_blocks=8, block_size=4, budget=8, max_seqs=2)
        numbers = [bench.add(tokens(seed, 11), max_tokens=6) for seed in range(3)]
        for _ in range(steps):
            bench.step()
        for number in numbers:
            bench.scheduler.abort((PEER, number))
            assert not bench.scheduler.abort((PEER, number)), "twice is harmless and says so"
        assert bench.pool.num_used == 0
        assert not bench.scheduler.queues.has_work
        assert bench.scheduler.schedule() is None


def test_steps_under_way_are_of_different_requests() -> None:
    bench = Bench(micro_batches=2)
    numbers = [bench.add(tokens(seed, 3), max_tokens=4) for seed in range(4)]
    first, second = bench.scheduler.schedule(), bench.scheduler.schedule()
    assert first is not None
    assert second is not None
    assert len(first.slots) == len(second.slots) == 2, "each takes its share of the requests"
    assert not set(first.slots) & set(second.slots)
    assert bench.scheduler.schedule() is None, "nobody's token is there yet"
    bench.under_way.extend((first, second))
    for step in (first, second):
        bench.executor.begin(step)
    bench.finish()
    assert all(bench.outputs[n] == expected_output(tokens(s, 3), 4) for s, n in enumerate(numbers))


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    bench = Bench(micro_batches=3, budget=8)
    number = bench.add(tokens(1, 30), max_tokens=2)
    steps = [bench.scheduler.schedule() for _ in range(3)]
    assert [(step.starts, step.counts) for step in steps if step] == [([0], [8]), ([8], [8]), ([16], [8])]
    for step in steps:
        assert step is not None
        bench.under_way.append(step)
        bench.executor.begin(step)
    bench.finish()
    assert bench.outputs[number] == expected_output(tokens(1, 30), 2)


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_a_prompt_under_way_takes_no_blocks_from_those_before_it(micro_batches: int) -> None:
    """The last block goes to a prefill chunk, while a decoding request waits for one.

    It waits in no step, while the next chunk wants more blocks.
    """
    bench = Bench(num_blocks=35, block_size=1, micro_batches=micro_batches, long_prefill_token_threshold=2)
    first = bench.add(tokens(1, 3), max_tokens=25)
    bench.step()
    late = bench.add(tokens(2, 31), max_tokens=2)
    while bench.requests[first].status is not Status.FINISHED:
        bench.step()
        assert bench.requests[first].status is not Status.WAITING
    assert bench.scheduler.counters().preemptions > 0, "there were too few blocks for both"
    bench.finish()
    assert bench.outputs[first] == expected_output(tokens(1, 3), 25)
    assert bench.outputs[late] == expected_output(tokens(2, 31), 2)


def test_nobody_comes_in_between_a_prompt_and_the_blocks_that_it_lacks() -> None:
    """A prompt under way gets free blocks before small requests do.

    They would take each free block, and the prompt would wait for ever.
    """
    bench = Bench(num_blocks=16, budget=16)
    first = bench.add(tokens(1, 31), max_tokens=9)
    assert [bench.step() for _ in range(2)] == [16, 15]
    long = bench.add(tokens(2, 32), max_tokens=3)
    assert [bench.step() for _ in range(3)] == [1 + 15, 1, 1], "it lacks one block of four"
    small = [bench.add(tokens(seed, 3), max_tokens=2) for seed in range(3, 8)]
    while bench.requests[first].status is Status.RUNNING:
        assert bench.step() == 1
    assert not any(bench.outputs[number] for number in (long, *small))
    assert [bench.step(), bench.step()] == [17, 1 + 3 * 5], "with a crumb beyond the budget"
    assert all(bench.outputs[number] for number in (long, *small))
    bench.finish()


def test_the_answer_for_an_aborted_request_is_not_given_to_the_one_that_has_its_slot() -> None:
    bench = Bench(micro_batches=2, max_seqs=1)
    gone = bench.add(tokens(1, 6), max_tokens=5)
    step = bench.scheduler.schedule()
    assert step is not None
    bench.under_way.append(step)
    bench.executor.begin(step)
    assert bench.scheduler.abort((PEER, gone))
    number = bench.add(tokens(2, 9), max_tokens=5)
    bench.finish()
    assert bench.outputs == {gone: [], number: expected_output(tokens(2, 9), 5)}


def test_blocks_of_a_step_under_way_are_known_after_its_request_is_aborted() -> None:
    bench = Bench(micro_batches=2, num_blocks=8, block_size=4)
    gone = bench.add(tokens(1, 10), max_tokens=5)
    step = bench.scheduler.schedule()
    assert step is not None
    bench.under_way.append(step)
    bench.executor.begin(step)
    held = bench.scheduler.blocks_in_flight()
    assert len(held) == bench.pool.num_used == 3
    assert bench.scheduler.abort((PEER, gone))
    assert bench.pool.num_used == 0
    assert bench.scheduler.blocks_in_flight() == held
    bench.finish()
    assert bench.scheduler.blocks_in_flight() == set()


def test_stop_tokens_and_minimum() -> None:
    prompt = tokens(7, 5)
    output = expected_output(prompt, 8)
    stop = output[3]
    at_least = output.index(stop) + 2
    later = [index for index, token in enumerate(output) if token == stop and index + 1 >= at_least]
    bench = Bench()
    number = bench.add(prompt, params=SamplingParams(max_tokens=8, stop_token_ids=(stop,)))
    other = bench.add(
        prompt, params=SamplingParams(max_tokens=8, stop_token_ids=(stop,), min_tokens=at_least)
    )
    bench.finish()
    assert bench.outputs[number] == output[: output.index(stop) + 1]
    assert bench.requests[number].stop_reason == stop
    assert bench.requests[number].finish_reason is FinishReason.STOP
    assert len(bench.outputs[other]) == (later[0] + 1 if later else 8)


def test_end_of_sequence_is_barred_before_the_minimum_even_where_it_is_ignored() -> None:
    bench = Bench()
    for ignore_eos, stops in ((False, (2, EOS)), (True, (2,))):
        params = SamplingParams(min_tokens=3, ignore_eos=ignore_eos, stop_token_ids=(2,))
        number = bench.add(tokens(1, 4), params=params)
        step = bench.scheduler.schedule()
        assert step is not None
        bench.executor.begin(step)
        bench.under_way.append(step)
        assert step.admits[0].barred_ids == (2, EOS)
        assert bench.requests[number].stop_ids == set(stops)
        bench.finish()


def test_whatever_ends_a_request_is_told() -> None:
    """The router decides which of the reasons reach clients."""
    bench = Bench()
    number = bench.add(tokens(7, 5), max_tokens=8)
    end = bench.requests[number].stop_ids = frozenset(expected_output(tokens(7, 5), 8)[3:4])
    bench.finish()
    assert {bench.requests[number].stop_reason} == end


def test_a_resumed_request_goes_on_where_it_was() -> None:
    prompt = tokens(8, 10)
    output = expected_output(prompt, 9)
    bench = Bench()
    number = bench.add(prompt, max_tokens=9, output_ids=output[:4])
    bench.finish()
    assert bench.outputs[number] == output[4:]


def test_prompt_logprobs_cover_the_prompt_once() -> None:
    for budget in (5, 64):
        bench = Bench(budget=budget)
        prompt = tokens(10, 23)
        number = bench.add(prompt, params=SamplingParams(max_tokens=2, prompt_logprobs=0))
        bench.finish()
        got = bench.requests[number].prompt_logprobs
        assert got is not None
        assert got[0] is None
        assert [entry.token_id for entry in got[1:] if entry] == prompt[1:]


def test_all_prompts_of_a_step_share_the_room_for_their_logprobs() -> None:
    bench = Bench(num_blocks=600, block_size=16, max_seqs=9, budget=2048)
    prompts = [tokens(seed, 1000) for seed in range(8)]
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    numbers = [bench.add(prompt, params=params) for prompt in prompts]
    other = bench.add(tokens(9, 300), max_tokens=2)

    def told() -> list[list[int]]:
        found = (bench.requests[number].prompt_logprobs or [] for number in numbers)
        return [[each.token_id for each in entries if each] for entries in found]

    before = 0
    while bench.scheduler.queues.has_work:
        bench.step()
        after = sum(map(len, told()))
        assert after - before <= PROMPT_LOGPROBS_CHUNK
        before = after
        assert bench.outputs[other], "who wants none does not wait for those who do"
    assert told() == [prompt[1:] for prompt in prompts]
    assert [bench.outputs[number] for number in numbers] == [expected_output(each, 2) for each in prompts]


def test_whole_prompts_share_it_too() -> None:
    """As well as they can: one that is left some of it goes."""
    bench = Bench(num_blocks=300, block_size=4, budget=1000, enable_chunked_prefill=False)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    numbers = [bench.add(tokens(seed, 200), params=params) for seed in range(3)]
    assert bench.step() == 400
    bench.finish()
    for seed, number in enumerate(numbers):
        assert bench.outputs[number] == expected_output(tokens(seed, 200), 2)


def test_who_was_told_the_prompt_does_not_ask_for_it_again() -> None:
    """A prompt's log probabilities are not computed again after a preemption or a loss.

    That would need a row of logits for each token.
    """
    bench = Bench()
    wanted = SamplingParams(max_tokens=4, prompt_logprobs=5)
    request = bench.requests[bench.add(tokens(10, 23), params=wanted)]
    assert admit_of(request, 0, 0).params.prompt_logprobs == 5
    request.prompt_logprobs = None  # as its first delta does
    assert admit_of(request, 0, 0).params.prompt_logprobs is None
    assert admit_of(request, 0, 0).params.max_tokens == 4


def test_priority_goes_first() -> None:
    bench = Bench(max_seqs=1)
    bench.add(tokens(1, 4))
    late = bench.add(tokens(2, 4), priority=5)
    urgent = bench.add(tokens(3, 4), priority=-1)
    bench.step()
    assert bench.requests[urgent].status is Status.RUNNING
    bench.finish()
    assert bench.requests[late].status is Status.FINISHED


def test_who_is_in_the_middle_of_an_answer_goes_before_who_has_not_begun() -> None:
    bench = Bench(max_seqs=1)
    waits = bench.add(tokens(1, 4))
    moved = bench.add(tokens(2, 4), output_ids=expected_output(tokens(2, 4), 2))
    bench.step()
    assert bench.requests[moved].status is Status.RUNNING
    assert bench.requests[waits].status is Status.WAITING
    bench.finish()
    assert bench.outputs[moved] == expected_output(tokens(2, 4), 5)[2:]


@pytest.mark.parametrize("room", [{}, {"max_seqs": 4}, {"num_blocks": 1 + 2 + 2 * 4 + 6}])
def test_one_of_lower_priority_that_has_begun_does_not_wait_for_their_share(room: dict[str, int]) -> None:
    """A begun request takes tokens that those before it may not have.

    It takes neither a slot nor blocks that they will need.
    """
    bench = Bench(budget=64, prompt_tokens_beside_decodes=6, **room)
    bench.add(tokens(1, 2), max_tokens=2)
    bench.step()
    fresh = [bench.add(tokens(seed, 15), max_tokens=2) for seed in (2, 3, 4)]
    moved = bench.add(tokens(5, 24), output_ids=expected_output(tokens(5, 24), 2), priority=1)
    assert bench.step() == (1 + 6 + 26 if not room else 1 + 6)
    assert len(bench.outputs[moved]) == (not room)
    assert len(bench.scheduler.queues.waiting) == (2 if not room else 3)
    bench.finish()
    assert bench.outputs[moved] == expected_output(tokens(5, 24), 5)[2:]
    for seed, number in zip((2, 3, 4), fresh, strict=True):
        assert bench.outputs[number] == expected_output(tokens(seed, 15), 2)


def test_without_chunked_prefill_prompts_run_whole() -> None:
    bench = Bench(budget=32, enable_chunked_prefill=False)
    numbers = [bench.add(tokens(seed, 20), max_tokens=3) for seed in range(3)]
    assert bench.step() == 20
    bench.finish()
    assert [bench.outputs[number] for number in numbers] == [
        expected_output(tokens(seed, 20), 3) for seed in range(3)
    ]


def test_what_can_never_run_is_said() -> None:
    bench = Bench(num_blocks=2, block_size=4)
    submit = Submit(
        request=1, request_id="r", prompt_ids=[1] * 6, params=SamplingParams(max_tokens=6), seed=0
    )
    request = from_submit(submit, PEER, arrival=1, eos_ids=(), max_model_len=100)
    assert bench.scheduler.problem_with(request) == (
        "the request may need 12 tokens, but the KV cache holds only 8"
    )


def test_drafts_that_are_right_save_steps() -> None:
    prompt = tokens(1, 10)
    steps = []
    for right in (0.0, 0.7, 1.0):
        bench = Bench(speculation=guesses(right))
        number = bench.add(prompt, max_tokens=60)
        bench.finish()
        assert bench.outputs[number] == expected_output(prompt, 60)
        assert bench.scheduler.counters().generation_tokens == 60
        steps.append(bench.executor.num_steps)
    assert steps[0] == 60
    assert steps[0] > steps[1] > steps[2]


def test_drafts_are_counted() -> None:
    bench = Bench(speculation=guesses(1.0))
    bench.add(tokens(1, 10), max_tokens=60)
    bench.finish()
    counters = bench.scheduler.counters()
    assert counters.drafted_tokens == sum(counters.taken_by_place) == 60 - bench.executor.num_steps
    assert counters.taken_by_place[0] == counters.drafts


def test_what_ends_a_request_ends_it_in_the_middle_of_a_draft() -> None:
    prompt = tokens(2, 8)
    expected = expected_output(prompt, 40)
    stop = next(token for token in expected[5:] if token not in expected[:5])
    for seed in range(20):
        bench = Bench(speculation=guesses(1.0, seed=seed))
        params = SamplingParams(max_tokens=40, stop_token_ids=(stop,))
        number = bench.add(prompt, params=params)
        bench.finish()
        assert bench.outputs[number] == expected[: expected.index(stop) + 1]
        assert bench.requests[number].finish_reason is FinishReason.STOP
        assert bench.requests[number].stop_reason == stop


def test_blocks_of_drafts_are_known_once_they_are_certain() -> None:
    prompt = tokens(3, 9)
    bench = Bench(speculation=guesses(0.8), num_blocks=40)
    first = bench.add(prompt, max_tokens=41)
    bench.finish()
    again = bench.add([*prompt, *bench.outputs[first]], max_tokens=3)
    bench.finish()
    assert bench.requests[again].num_cached == 48  # of 50: all blocks that are full and computed
    assert bench.outputs[again] == expected_output([*prompt, *bench.outputs[first]], 3)


def test_drafts_take_no_room_that_others_need() -> None:
    bench = Bench(speculation=guesses(1.0), budget=8, max_seqs=8, num_blocks=256)
    numbers = [bench.add(tokens(seed, 2), max_tokens=100) for seed in range(8)]
    for _ in range(4):
        bench.step()
    before = {number: len(bench.outputs[number]) for number in numbers}
    bench.step()
    assert {number: len(bench.outputs[number]) - 1 for number in numbers} == before
    bench.finish()


def test_drafts_leave_prompts_most_of_a_step() -> None:
    bench = Bench(speculation=guesses(1.0, most=40), budget=40, num_blocks=256)
    bench.add(tokens(1, 4), max_tokens=500)
    bench.step()
    assert max(bench.step() for _ in range(4)) > 20
    long = bench.add(tokens(2, 200), max_tokens=1)
    steps = 0
    while not bench.outputs[long]:
        assert bench.step() == 40 or bench.outputs[long]
        steps += 1
    assert steps <= 200 // (40 - 1 - 39 // 4) + 1
    bench.finish()


def test_nobody_is_preempted_for_a_draft() -> None:
    """Four requests of four blocks each, and not one block more."""
    bench = Bench(speculation=guesses(0.5, most=20), num_blocks=16, block_size=4, budget=64)
    numbers = [bench.add(tokens(seed, 5), max_tokens=11) for seed in range(4)]
    bench.finish()
    for seed, number in enumerate(numbers):
        assert bench.outputs[number] == expected_output(tokens(seed, 5), 11)
    assert bench.scheduler.counters().preemptions == 0
    assert bench.scheduler.counters().drafts > 0


@pytest.mark.parametrize("chunked", [True, False])
def test_no_prompt_waits_for_a_draft(chunked: bool) -> None:
    """It gets the blocks and, if it is computed whole, the tokens that it needs."""
    bench = Bench(speculation=guesses(1.0, most=30), num_blocks=32, budget=64, enable_chunked_prefill=chunked)
    bench.add(tokens(1, 4), max_tokens=55)
    bench.step()
    late = bench.add(tokens(2, 60), max_tokens=3)
    bench.step()
    bench.step()
    assert bench.outputs[late], "at once, or in the second step if it was cut"
    bench.finish()


def test_streams_of_samples_differ() -> None:
    assert stream_seed(7, 0) == 7
    assert len({stream_seed(7, index) for index in range(100)}) == 100
    assert 0 <= stream_seed(2**63 - 1, 99) < 2**64


@pytest.mark.parametrize("index", [1, 2, 127])
def test_no_sample_has_a_seed_that_no_request_can_ask_for(index: int) -> None:
    """A request with the seed -1 gets a new one."""
    seed = (-1 - index * 0x9E3779B97F4A7C15) % 2**64
    signed = seed - 2**64 if seed >= 2**63 else seed
    assert stream_seed(signed, index) == 2**64 - 2
    assert stream_seed(signed + 1, index) == 0
    assert len({stream_seed(signed, each) for each in range(128)}) == 128


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(10, 30),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(6, 40),
    max_seqs=st.integers(1, 6),
    threshold=st.sampled_from([0, 3]),
    micro_batches=st.sampled_from([1, 1, 2, 3]),
    right=st.sampled_from([None, "looked up", 0.0, 0.8, 1.0]),
    beside=st.sampled_from([None, 1, 5]),
)
def test_any_load_gives_what_each_request_gives_alone(
    seed: int,
    num_blocks: int,
    block_size: int,
    budget: int,
    max_seqs: int,
    threshold: int,
    micro_batches: int,
    right: float | str | None,
    beside: int | None,
) -> None:
    rng = random.Random(seed)
    speculation = Speculation(SpeculativeConfig(prompt_lookup_min=1)) if right == "looked up" else None
    if isinstance(right, float):
        speculation = guesses(right, seed=seed)
    bench = Bench(
        speculation=speculation,
        num_blocks=num_blocks,
        block_size=block_size,
        budget=max(budget, max_seqs),
        max_seqs=max_seqs,
        long_prefill_token_threshold=threshold,
        prompt_tokens_beside_decodes=beside,
        micro_batches=micro_batches,
    )
    capacity = num_blocks * block_size
    wanted: dict[int, tuple[list[int], int]] = {}
    aborted = set()
    for _ in range(rng.randrange(1, 25)):
        if rng.random() < 0.5:
            length = rng.randrange(1, max(2, capacity - 2))
            prompt = tokens(rng.randrange(3), length)  # few seeds, so that prefixes repeat
            most = rng.randrange(1, max(2, min(12, capacity - length + 1)))
            wanted[bench.add(prompt, max_tokens=most)] = (prompt, most)
        elif wanted and rng.random() < 0.2:
            victim = rng.choice(list(wanted))
            if bench.scheduler.abort((PEER, victim)):
                aborted.add(victim)
        else:
            bench.step()
    bench.finish()
    for number, (prompt, most) in wanted.items():
        expected = expected_output(prompt, most)
        if number in aborted:
            assert bench.outputs[number] == expected[: len(bench.outputs[number])]
        else:
            assert bench.outputs[number] == expected


@pytest.mark.parametrize("bad", [{"num_blocks": 0}])
def test_bad_sizes(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        Bench(**bad)


def test_lines_of_batches_run_while_no_other_request_does() -> None:
    bench = Bench(max_seqs=4)
    lines = [bench.add(tokens(seed, 6), max_tokens=8, priority=BATCH_PRIORITY) for seed in range(3)]
    bench.step()
    bench.step()
    before = {number: len(bench.outputs[number]) for number in lines}
    assert all(before.values())
    urgent = bench.add(tokens(9, 6), max_tokens=4)
    waiting = bench.add(tokens(10, 6), max_tokens=3, priority=BATCH_PRIORITY)
    while bench.requests[urgent].status is not Status.FINISHED:
        bench.step()
        assert {number: len(bench.outputs[number]) for number in lines} == before
        assert bench.requests[waiting].status is Status.WAITING
    assert bench.scheduler.counters().preemptions == 0, "they keep what is computed"
    bench.finish()
    for seed, number in enumerate(lines):
        assert bench.outputs[number] == expected_output(tokens(seed, 6), 8)
