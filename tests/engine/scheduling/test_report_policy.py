"""Reports that go along with tokens, and those that go alone, by lists of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Counters, InstanceReport
from engine.scheduling.report_policy import WITH_TOKENS, WITHOUT_TOKENS, LoadSnapshot, ReportPolicy

IDLE = LoadSnapshot(
    running=0, waiting=0, waiting_tokens=0, uncached_tokens=0, queued=0,
    blocks_used=0, generation_tokens=0, steps=0,
)  # fmt: skip


def report_of(snapshot: LoadSnapshot, last_dispatch: int) -> InstanceReport:
    counters = Counters(generation_tokens=snapshot.generation_tokens, steps=snapshot.steps)
    return InstanceReport(
        last_dispatch,
        snapshot.running,
        snapshot.waiting,
        snapshot.waiting_tokens,
        snapshot.blocks_used,
        100,
        counters,
        uncached_tokens=snapshot.uncached_tokens,
        queued=snapshot.queued,
    )


def told(events: list[tuple[float, int, LoadSnapshot]]) -> list[float]:
    """The moments of sending tokens at which a report goes along."""
    policy, found = ReportPolicy(), []
    for now, last_dispatch, snapshot in events:
        if policy.goes_along(snapshot, last_dispatch, now):
            policy.sent(report_of(snapshot, last_dispatch), now)
            found.append(now)
    return found


def test_what_is_chosen_by_goes_with_the_next_tokens_and_counts_from_time_to_time() -> None:
    one = IDLE._replace(running=1)
    grown = one._replace(blocks_used=9, generation_tokens=90, steps=90)
    assert told(
        [
            (0.000, 1, one),  # the first word
            (0.001, 1, grown),
            (0.002, 2, grown),  # a dispatch is counted now
            (0.003, 2, grown._replace(waiting=1)),
            (0.004, 2, grown._replace(waiting=1)),
            (0.005, 2, grown._replace(waiting=1, waiting_tokens=5)),
            (0.006, 2, grown._replace(waiting=1, waiting_tokens=5, uncached_tokens=5)),
            (0.007, 2, grown._replace(waiting=1, waiting_tokens=5, uncached_tokens=5, queued=1)),
            (0.008, 2, grown),
            (0.009 + WITH_TOKENS / 2, 2, grown),
            (0.009 + WITH_TOKENS, 2, grown),
            (0.010 + WITH_TOKENS, 2, grown),
        ]
    ) == [0.000, 0.002, 0.003, 0.005, 0.006, 0.007, 0.008, 0.009 + WITH_TOKENS]


def test_alone_only_after_a_while_and_if_it_is_news() -> None:
    policy = ReportPolicy()
    assert policy.may_go_alone(0.0)
    first = report_of(IDLE, 0)
    assert policy.is_new(first)
    policy.sent(first, 1.0)
    assert not policy.may_go_alone(1.0 + WITHOUT_TOKENS / 2)
    assert policy.may_go_alone(1.0 + WITHOUT_TOKENS)
    assert not policy.is_new(first)
    assert policy.is_new(report_of(IDLE._replace(steps=1), 0))


SNAPSHOTS = st.builds(LoadSnapshot, *[st.integers(0, 2)] * 8)


@given(st.lists(st.tuples(st.floats(0.0, 0.04), st.integers(0, 2), SNAPSHOTS), max_size=40))
def test_a_router_that_gets_tokens_chooses_by_what_is_true(
    events: list[tuple[float, int, LoadSnapshot]],
) -> None:
    """Load counts are exact with each report; other facts are a moment old."""
    policy, now, knows, knew_at = ReportPolicy(), 0.0, report_of(IDLE, 0), float("-inf")
    for passed, last_dispatch, snapshot in events:
        now += passed
        if policy.goes_along(snapshot, last_dispatch, now):
            knows, knew_at = report_of(snapshot, last_dispatch), now
            policy.sent(knows, now)
        assert (knows.last_dispatch, knows.running, knows.waiting) == (last_dispatch, *snapshot[:2])
        assert (knows.waiting_tokens, knows.uncached_tokens, knows.queued) == snapshot[2:5]
        assert now - knew_at < WITH_TOKENS
