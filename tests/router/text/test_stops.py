"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stops import StopStrings


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    search = StopStrings(stops).search(include_in_output=include)
    text = "".join(search.feed(piece) for piece in pieces)
    return text + search.flush(), search.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["stop"], ["go s", "t", "op here"], "go ", "stop"),
        (["stop"], ["go sto"], "go sto", None),
        (["stop"], ["ststop"], "st", "stop"),
        (["aab"], ["aaab"], "a", "aab"),
        (["abcd", "bc"], ["xabc"], "xa", "bc"),
        (["c", "abc"], ["xabc"], "x", "abc"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["🙂"], ["a🙂b"], "a", "🙂"),
        (["a"], ["a"], "", "a"),
    ],
)
def test_match(stops: list[str], pieces: list[str], text: str, matched: str | None) -> None:
    assert run(stops, pieces) == (text, matched)


def test_the_stop_string_can_be_included() -> None:
    assert run(["stop"], ["go st", "op here"], include=True) == ("go stop", "stop")


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    search = StopStrings(["Observation:"]).search()
    assert search.feed("an Obs") == "an "
    assert search.feed("tacle") == "Obstacle"
    assert search.feed(" Observation") == " "
    assert repr(search) == "<StopSearch holding 'Observation', matched None>"
    assert search.feed(":x") == ""
    assert search.matched == "Observation:"
    assert search.feed("more") == ""


def test_unarmed_text_passes_but_can_begin_a_match() -> None:
    search = StopStrings(["stop"]).search()
    assert search.feed("stop st", armed=False) == "stop "
    assert search.feed("op") == ""
    assert search.matched == "stop"


texts = st.text(alphabet="ab", max_size=12)


@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(texts, max_size=6),
)
def test_the_cut_into_pieces_does_not_matter(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    text, matched = run(stops, pieces)
    assert (text, matched) == run(stops, [whole])
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if not ends:
        assert (text, matched) == (whole, None)
        return
    longest = max((stop for stop in stops if whole[: min(ends)].endswith(stop)), key=len)
    assert matched == longest
    assert text + matched == whole[: min(ends)]
