"""What last words and their absence mean, as lists of events."""

from __future__ import annotations

import errno

import pytest

from parallel.links.last_words import ABORTED, CLOSED, Blame, LastWords, encoded, word_for

GARBAGE = ("rank 1 sends what is no last word", 1, "closed")


def heard(*events: tuple[str, object]) -> list[Blame | None]:
    """What each of these events of rank 1 means to another member of three."""
    words = LastWords(3)
    return [
        getattr(words, call)(1, *given) if isinstance(given, tuple) else getattr(words, call)(1, given)
        for call, given in events
    ]


def test_each_reason_to_leave_has_its_word() -> None:
    assert heard(("hear", encoded(CLOSED))) == [None]
    assert heard(("hear", encoded(ABORTED))) == [("rank 1 has aborted", None, "closed")]
    assert word_for(None) == ABORTED
    for rank in range(3):
        said = f"rank 1 has given up because of rank {rank}"
        assert heard(("hear", encoded(word_for(rank)))) == [(said, rank, "closed")]


def test_a_word_may_come_in_pieces() -> None:
    word = encoded(word_for(2))
    assert heard(*(("hear", word[at : at + 1]) for at in range(7)), ("hear", word[7:])) == [None] * 7 + [
        ("rank 1 has given up because of rank 2", 2, "closed")
    ]


@pytest.mark.parametrize(
    "content", [encoded(0), encoded(-1), encoded(6), b"\xff" * 8, encoded(CLOSED) + b"x", bytes(1 << 20)]
)
def test_anything_else_is_no_word(content: bytes) -> None:
    assert heard(("hear", content)) == [GARBAGE]


def test_after_its_word_a_member_has_nothing_to_say() -> None:
    assert heard(("hear", encoded(CLOSED)), ("hear", b"x"), ("hear", b"more")) == [None, GARBAGE, GARBAGE]


def test_an_end_without_a_word_is_a_death_or_a_broken_connection() -> None:
    assert heard(("exit", ())) == [("rank 1 has died", 1, "exited")]
    assert heard(("end", 0)) == [("the connection to rank 1 broke", 1, "closed")]
    assert heard(("end", errno.ETIMEDOUT)) == [
        ("the connection to rank 1 broke (Connection timed out)", 1, "closed")
    ]
    words = LastWords(3)
    assert words.end(1, has_exited=True) == ("rank 1 has died", 1, "exited")
    assert heard(("hear", encoded(CLOSED)[:5]), ("end", 0))[1] == (
        "the connection to rank 1 broke", 1, "closed",
    )  # fmt: skip


def test_who_has_closed_its_end_may_go() -> None:
    farewell = ("hear", encoded(CLOSED))
    assert heard(farewell, ("end", 0), ("exit", ())) == [None] * 3
    assert heard(farewell, ("end", errno.ECONNRESET)) == [None, None]


def test_but_nobody_may_need_it_any_more() -> None:
    assert heard(("hear", encoded(CLOSED)), ("lose", 0))[1] == ("rank 1 has closed its end", 1, "closed")
    assert heard(("lose", errno.ECONNRESET)) == [
        ("the connection to rank 1 broke (Connection reset by peer)", 1, "closed")
    ]
