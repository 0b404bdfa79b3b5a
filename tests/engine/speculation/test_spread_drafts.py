"""Drafts of an instance that shares experts: no row is computed for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.config.speculation import read_config
from engine.kernels.core import library
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from engine.model.finding import find_model
from engine.sampling import SamplingParams
from engine.speculation.speculation import Speculation
from engine.step import Step
from tests.engine.invariance.answers import NGRAMS
from tests.engine.invariance.spread import Members, in_shared_memory

pytestmark = pytest.mark.skipif(library.load() is None, reason="no native kernels here")


class CountedRows:
    """Rows that the steps of an executor have, and those that its last layer computes."""

    def __init__(self, executor: Any) -> None:
        self.rows = self.sampled = 0
        self._begin = executor.begin
        executor.begin = self.begin

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        self.rows += step.num_tokens
        self.sampled += sum(
            1 + len(step.drafts.get(row, ())) for row in range(len(step.slots)) if row not in step.partial
        )
        self._begin(step, sizes)


def computed_by(members: Members) -> int:
    """Rows that all experts of all instances computed, over all layers."""
    return sum(sum(each.tokens_per_expert().values()) for each in members.executors)


@pytest.mark.parametrize("count", [1, 4], ids=["the other is idle", "the other does not draft"])
def test_experts_compute_the_rows_of_requests_and_of_their_drafts_alone(count: int) -> None:
    directory = find_model(None)
    text = [5, 6, 7, 8, 9, 10] * 6
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    submits = [
        Submit(request=each, request_id=str(each), prompt_ids=[20 + each, *text], params=params, seed=each)
        for each in range(count)
    ]
    members = Members(directory, 2, in_shared_memory)
    first = members.cores[0].scheduler
    first._speculation = first._drafting._speculation = Speculation(read_config(NGRAMS))
    counted = [CountedRows(each) for each in members.executors]
    before = computed_by(members)
    members.answers(submits)
    drafted = [core.scheduler.counters().drafted_tokens for core in members.cores]
    computed = computed_by(members) - before
    members.close()
    assert drafted[0] > 10
    assert drafted[1] == 0
    assert (counted[1].rows == 0) == (count == 1)
    info = read_model_info(directory)
    rows, sampled = sum(each.rows for each in counted), sum(each.sampled for each in counted)
    assert computed == 2 * ((info.num_layers - 1) * rows + sampled)
