from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.compute.step_results import num_taken
from engine.config.speculation import SpeculativeConfig, read_config
from engine.speculation import ngram_index as places_module
from engine.speculation import speculation as speculation_module
from engine.speculation.draft_prices import DraftTrust, StepCost
from engine.speculation.ngram_index import NgramIndex
from engine.speculation.speculation import Drafter, Speculation, Text
from engine.step import Step

CHEAP = 0.05


def drafter(**settings: int) -> Drafter:
    return Drafter(SpeculativeConfig(**settings), 0.7)  # type: ignore[arg-type]


def drafted(by: Drafter, tokens: list[int], most: int) -> list[int]:
    return by.draft(tokens, most, CHEAP, allowance=1000)[0]


def test_what_followed_the_same_tokens_is_drafted() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert drafted(drafter(), text, 3) == [4, 5, 6]
    assert drafted(drafter(), [1, 2, 3, 4], 3) == []
    assert drafted(drafter(prompt_lookup_min=4), text, 3) == []


def test_the_place_with_the_longest_match_wins_then_the_newest() -> None:
    longer, shorter = [9, 1, 2, 70], [8, 1, 2, 60]
    assert drafted(drafter(), [*longer, *shorter, 9, 1, 2], 1) == [70]
    assert drafted(drafter(), [*longer, *shorter, 5, 1, 2], 1) == [60]
    assert drafted(drafter(prompt_lookup_max=2), [*longer, *shorter, 9, 1, 2], 1) == [60]


def test_a_text_that_repeats_itself_goes_on_repeating_itself() -> None:
    assert drafted(drafter(), [5, 7, 7, 7], 4) == [7, 7, 7, 7]
    assert drafted(drafter(), [5, 1, 2, 3, 1, 2, 3, 1, 2], 5) == [3, 1, 2, 3, 1]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4), st.integers(0, 3))
def test_places_are_those_that_a_search_finds(text: list[int], shortest: int, more: int) -> None:
    """Token by token, as an output grows."""
    places = NgramIndex(shortest, shortest + more)
    for length in range(1, len(text) + 1):
        tokens = text[:length]
        place = places.find(tokens, allowance=1000)
        earlier = [
            end
            for end in range(shortest - 1, length - 1)
            if tokens[end + 1 - shortest : end + 1] == tokens[-shortest:]
        ]
        if length <= shortest or not earlier:
            assert place is None
            continue
        looked_at = earlier[::-1][: places_module.MOST_COMPARED]
        assert place == max(looked_at, key=lambda end: (agreeing(tokens, end, shortest + more), end))


def agreeing(tokens: list[int], end: int, most: int) -> int:
    count = 0
    while count < most and count <= end and tokens[end - count] == tokens[-1 - count]:
        count += 1
    return count


def test_long_texts_are_looked_through_in_parts_and_all_of_a_step_share_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speculation_module, "MOST_INDEXED", 30)
    speculation = trusting(SpeculativeConfig())
    text = [*range(40), *range(10)]
    three: list[Text] = [(speculation.drafter(), text, 5) for _ in range(3)]
    found = [[bool(draft) for draft in speculation.draft(three, 3, 100)] for _ in range(6)]
    held = [len(drafter) for drafter, _, _ in three]
    assert found[0] == [False, False, False]
    assert found[1] == [True, False, False]
    assert found[-1] == [True, True, True]
    assert held == [49, 49, 49]


def test_so_many_texts_are_kept_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation_module, "MOST_HELD", 60)
    speculation = trusting(SpeculativeConfig())
    text = [*range(40), *range(10)]
    two: list[Text] = [(speculation.drafter(), text, 5) for _ in range(2)]
    for _ in range(5):
        found = speculation.draft(two, 2, 100)
    assert [bool(draft) for draft in found] == [True, False]
    assert len(speculation.draft(two[1:], 1, 100)[0]) > 0, "once the other one has gone"


@pytest.mark.parametrize(
    ("draft", "sampled", "taken"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3, 4], 1), ([1, 2], [2, 2, 4], 0)],
)
def test_a_draft_counts_up_to_the_first_token_that_is_another(
    draft: list[int], sampled: list[int], taken: int
) -> None:
    assert num_taken(draft, sampled) == taken


def test_drafts_grow_where_they_are_taken_and_shrink_where_not() -> None:
    trust = DraftTrust(0.7)
    begun, _ = trust.length(20, 0.2)
    for _ in range(20):
        trust.learn(4, 4, 0.2)
    length, gain = trust.length(20, 0.2)
    assert length > begun > 0
    assert trust.length(3, 0.2)[0] == 3
    assert 0 < trust.length(3, 0.2)[1] < gain < length
    for _ in range(5):
        trust.learn(4, 0, 0.2)
    assert trust.length(20, 0.2)[0] < begun


def test_what_is_never_taken_is_tried_ever_more_rarely_and_what_is_again_at_once() -> None:
    trust = DraftTrust(0.7)
    drafted = []
    for token in range(2000):
        if trust.length(5, 0.3)[0]:
            drafted.append(token)
            trust.learn(1, 0, 0.3)
    gaps = [after - before for before, after in pairwise(drafted)]
    assert len(drafted) < 60
    assert max(gaps) == DraftTrust.LONGEST_PAUSE + 1
    for _ in range(20):
        while not (length := trust.length(5, 0.3)[0]):
            pass
        trust.learn(length, length, 0.3)
    assert trust.length(5, 0.3)[0] == 5


def test_where_a_token_costs_a_whole_step_none_is_drafted() -> None:
    trust = DraftTrust(0.7)
    for _ in range(20):
        trust.learn(4, 3, 0.95)
    assert trust.length(20, 0.95)[1] < 0
    assert trust.length(20, 0.05)[0] > 4


@pytest.mark.parametrize("extra", [0.0, 0.002])
@pytest.mark.parametrize(("fixed", "each"), [(0.004, 0.0), (0.004, 0.0001), (0.0, 0.001), (0.001, 0.001)])
def test_what_tokens_and_drafts_cost_is_learnt(fixed: float, each: float, extra: float) -> None:
    """Steps of 8 rows, some of them with drafts.

    Now and then something else has the cores.
    """
    cost, chance = StepCost(), random.Random(1)
    for step in range(480):
        drafts = chance.random() < 0.5
        tokens = 8 + drafts * chance.randrange(1, 30)
        seconds = (fixed + each * tokens + extra * drafts) * chance.uniform(0.97, 1.03)
        cost.took(tokens, drafts, seconds * 20 if step % 100 == 99 else seconds)
    price, drafting = cost.prices(8)
    token = (fixed + each * 8) / 8
    assert price == pytest.approx(min(0.95, max(0.05, each / token)), abs=0.15)
    assert drafting == pytest.approx(extra / token, abs=0.5)


def test_costs_are_guessed_until_steps_differ() -> None:
    cost = StepCost()
    assert cost.prices(4) == (StepCost.GUESSED_SHARE, 4 * StepCost.GUESSED_EXTRA)
    for _ in range(100):
        cost.took(4, False, 0.01)
    price, drafting = cost.prices(4)
    assert price == pytest.approx(StepCost.GUESSED_SHARE, abs=0.05)
    assert drafting == pytest.approx(4 * StepCost.GUESSED_EXTRA, abs=0.05)


def trusting(config: SpeculativeConfig) -> Speculation:
    """A drafter that has seen its drafts being accepted."""
    speculation = Speculation(config)
    for _ in range(20):
        speculation.learn(speculation.drafter(), 4, 4)
    return speculation


def texts(speculation: Speculation, number: int) -> list[Text]:
    """Texts each of which repeats itself."""
    return [(speculation.drafter(), [1, 2, 3, 4, 5, 6] * 3, 100) for _ in range(number)]


def test_all_drafts_of_a_step_share_its_room() -> None:
    speculation = trusting(SpeculativeConfig(num_speculative_tokens=3))
    assert [len(draft) for draft in speculation.draft(texts(speculation, 4), 4, 100)] == [3, 3, 3, 3]
    assert [len(draft) for draft in speculation.draft(texts(speculation, 4), 4, 7)] == [3, 3, 1, 0]
    assert [len(draft) for draft in speculation.draft(texts(speculation, 4), 4, 0)] == [0, 0, 0, 0]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_fixed_drafts_follow_neither_acceptance_nor_seconds(method: str) -> None:
    model = "m" if method == "draft_model" else ""
    speculation = Speculation(
        SpeculativeConfig(method=method, model=model, num_speculative_tokens=3, adaptive=False)  # type: ignore[arg-type]
    )
    (drafter, text, _) = texts(speculation, 1)[0]
    for _ in range(600):
        assert not speculation.is_off(32)
        assert not speculation.rests
        assert not speculation.prices_step()
        if method == "draft_model":
            assert speculation.ask([(drafter, 100)], 32) == [3]
            drafter.offer(len(text), [7, 8, 9])
        assert [len(draft) for draft in speculation.draft([(drafter, text, 100)], 32, 100)] == [3]
        speculation.learn(drafter, 3, 0)


def combined() -> Drafter:
    settings = '{"method": "eagle3", "model": "head", "prompt_lookup_min": 3}'
    return Drafter(read_config(settings), 0.7)


def test_a_text_goes_before_a_model_where_it_has_a_match() -> None:
    by, text = combined(), [1, 2, 3, 4, 5, 6]
    by.offer(len(text), [50, 51])
    assert drafted(by, text, 3) == [50, 51]
    text += [1, 2, 3]
    by.offer(len(text), [60])
    assert drafted(by, text, 2) == [4, 5]
    text += [4, 5]
    assert by.ask(3, CHEAP)[0] > 0
    by.learn(2, 2, CHEAP)
    assert by.ask(3, CHEAP) == (0, 0.0), "the text goes on being right"
    by.learn(2, 1, CHEAP)
    assert by.ask(3, CHEAP)[0] > 0


def test_what_a_model_gave_is_for_one_text() -> None:
    by, text = combined(), [1, 2, 3, 4, 5, 6]
    by.offer(len(text), [50, 51])
    assert drafted(by, text, 3) == [50, 51]
    assert drafted(by, [*text, 50], 3) == []


def test_a_model_goes_first_where_matches_turn_out_wrong() -> None:
    by, text = combined(), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    for _ in range(40):
        by.offer(len(text), [60, 61])
        draft = drafted(by, text, 2)
        by.learn(len(draft), 2 if draft == [60, 61] else 0, CHEAP)
    assert draft == [60, 61]
    assert by.ask(2, CHEAP)[0] == 2


def test_a_new_request_is_expected_to_be_as_those_before_it() -> None:
    speculation = Speculation(SpeculativeConfig())
    (unknown,) = speculation.draft(texts(speculation, 1), 1, 100)
    (trusted,) = (once := trusting(SpeculativeConfig())).draft(texts(once, 1), 1, 100)
    for _ in range(60):
        speculation.learn(speculation.drafter(), 4, 0)
    (distrusted,) = speculation.draft(texts(speculation, 1), 1, 100)
    assert len(trusted) > len(unknown) > 0
    assert not distrusted


def test_nothing_is_drafted_for_larger_batches_than_is_wanted() -> None:
    speculation = Speculation(SpeculativeConfig(disable_by_batch_size=4))
    assert not speculation.is_off(4)
    assert speculation.is_off(5)
    assert not Speculation(SpeculativeConfig()).is_off(1000)


def test_drafts_that_bring_less_than_drafting_costs_are_left_out_but_for_a_try() -> None:
    speculation = trusting(SpeculativeConfig())
    for _ in range(50):
        for step in range(12):
            slow = step in (10, 11)  # with drafts, and the one after it
            made = Step(slots=[*range(32)], counts=[1 + (step == 10), *[1] * 31])
            if step == 10:
                made = msgspec.structs.replace(made, drafts={0: [5]})
            speculation.took(made, 0.012 if slow else 0.010, 0.0)
    few, many = texts(speculation, 1), texts(speculation, 32)
    assert all(speculation.draft(many, 32, 500))
    steps = [bool(speculation.draft(few, 32, 500)[0]) for _ in range(100)]
    assert sum(steps) == 100 // (Speculation.LONGEST_REST + 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"method": "ngram"}', SpeculativeConfig()),
        ('{"model": "[ngram]", "num_speculative_tokens": 3}', SpeculativeConfig(num_speculative_tokens=3)),
        ('{"method": null, "model": "ngram", "prompt_lookup_min": null}', SpeculativeConfig()),
        (
            '{"method": "ngram", "prompt_lookup_max": 4}',
            SpeculativeConfig(prompt_lookup_min=4, prompt_lookup_max=4),
        ),
        (
            '{"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 7, "disable_by_batch_size": 8}',
            SpeculativeConfig(prompt_lookup_min=3, prompt_lookup_max=7, disable_by_batch_size=8),
        ),
    ],
)
def test_settings_are_those_of_vllm(text: str, expected: SpeculativeConfig) -> None:
    assert read_config(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ngram", "malformed"),
        ("[]", "Expected `object`"),
        ("{}", 'must be "ngram"'),
        ('{"method": "draft_model"}', 'needs "model"'),
        ('{"method": "ngram", "model": "small"}', 'takes no "model"'),
        ('{"method": "eagle3"}', 'needs "model"'),
        ('{"method": "ngram", "combines": true}', "has no model beside which"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens: Expected `int` >= 1"),
        ('{"a":' * 5000, "recursion"),
        ('{"method": "ngram", "num_speculative_tokens": 1000}', "<= 64"),
        ('{"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 5}', "must not exceed"),
        ('{"method": "ngram", "tokens": 3}', "unknown field `tokens`"),
    ],
)
def test_what_is_wrong_with_settings_is_said(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="--speculative-config: ") as caught:
        read_config(text)
    assert why in str(caught.value)
