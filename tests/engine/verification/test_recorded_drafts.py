"""Drafts that are recorded tokens: long while all is as recorded, short behind a difference."""

from __future__ import annotations

from engine.verification.recorded_drafts import LONGEST, MOST_LOGITS, SHORTEST, RecordedDrafts

PROMPT = [7, 8, 9]
ANSWER = list(range(100, 1300))


def drafts_of(answer: list[int] = ANSWER, vocab_size: int = 1000) -> RecordedDrafts:
    found = RecordedDrafts(vocab_size)
    found.expect(len(PROMPT), answer)
    return found


def test_what_was_recorded_behind_a_text_is_drafted_whatever_steps_took() -> None:
    drafts = drafts_of()
    drafter, text = drafts.drafter(), [*PROMPT, *ANSWER[:5]]
    assert drafts.draft([(drafter, text, 10)], 1, 100) == [ANSWER[5:15]]
    assert drafts.draft([(drafter, text, 5000)], 1, 5000) == [ANSWER[5 : 5 + LONGEST]]
    assert drafts.draft([(drafter, PROMPT + ANSWER, 10)], 1, 100) == [[]]
    assert not drafts.is_off(1000)
    assert not drafts.rests


def test_requests_of_a_step_share_its_room() -> None:
    drafts = drafts_of()
    first = drafts.drafter()
    drafts.expect(1, [3, 4])
    second = drafts.drafter()
    texts = [(first, PROMPT, 50), (second, [1], 50)]
    assert list(map(len, drafts.draft(texts, 2, 51))) == [50, 1]
    assert list(map(len, drafts.draft(texts, 2, 40))) == [40, 0]


def test_drafts_are_short_behind_a_difference_and_grow_again() -> None:
    drafts = drafts_of()
    drafter, lengths = drafts.drafter(), []
    drafts.learn(drafter, 100, 99)
    for _ in range(9):
        (found,) = drafts.draft([(drafter, PROMPT, 5000)], 1, 5000)
        lengths.append(len(found))
        drafts.learn(drafter, len(found), len(found))
    assert lengths == [min(LONGEST, SHORTEST << number) for number in range(9)]


def test_logits_of_a_draft_are_bounded() -> None:
    drafts = drafts_of(vocab_size=MOST_LOGITS // 16)
    assert len(drafts.draft([(drafts.drafter(), PROMPT, 5000)], 1, 5000)[0]) == 16
