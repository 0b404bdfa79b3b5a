"""Blocks that lack an image's rows: nobody finds them once that is known."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from engine.messages import FinishReason
from engine.prompt_images import PromptImage
from engine.scheduling.output_processor import NOT_ENCODED
from engine.scheduling.request import Status
from tests.engine.scheduling.test_scheduler import PEER, Bench, tokens

IMAGE = PromptImage(2, 10, b"seen" * 4)
SHARED = tokens(1, 16)


def fail_oldest(bench: Bench, failed: Sequence[int]) -> None:
    """Take in the oldest step, in which rows of these requests lacked an image's."""
    step = bench.under_way.popleft()
    requests = bench.scheduler._in_flight[0].requests
    rows = [requests.index(bench.requests[number]) for number in failed]
    bench.scheduler.update(step, msgspec.structs.replace(bench.executor.finish(), failed_images=rows))


def begin(bench: Bench) -> None:
    step = bench.scheduler.schedule()
    assert step is not None
    bench.executor.begin(step)
    bench.under_way.append(step)


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_sharer_of_wrong_blocks_leaves_no_names(is_aborted: bool, is_later: bool) -> None:
    """Its own blocks behind the common ones are wrong, also if its client has left."""
    bench = Bench(micro_batches=1 + is_later, budget=64)
    failing = bench.add([*SHARED, *tokens(2, 4)], images=(IMAGE,))
    if is_later:
        begin(bench)
    sharer = bench.add([*SHARED, *tokens(3, 9)], images=(IMAGE,))
    text = bench.add(tokens(4, 20))
    begin(bench)
    request = bench.requests[sharer]
    assert request.num_found == len(SHARED)
    own = request.hashes[len(SHARED) // 4 :]
    assert own
    assert all(map(bench.pool.knows, request.hashes))
    if is_aborted:
        bench.scheduler.abort((PEER, sharer))
    fail_oldest(bench, [failing])
    assert not any(map(bench.pool.knows, request.hashes)), "others go on behind an image that is not there"
    assert all(map(bench.pool.knows, bench.requests[text].hashes))
    ended = FinishReason.ABORT if is_aborted else FinishReason.ERROR
    assert (request.status, request.finish_reason) == (Status.FINISHED, ended)
    assert request.error == ("" if is_aborted else NOT_ENCODED)
    bench.finish()
    assert bench.requests[text].finish_reason is FinishReason.LENGTH
