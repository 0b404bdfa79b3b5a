"""Rules of writing find what they forbid."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import writing


def test_sentences_of_pages_are_counted() -> None:
    page = "# A b\n\nOne two. Three `four five`:\n\n```\nsix\n```\n\n- seven [eight nine](x.md); ten\n\n| eleven |\n"
    assert [each for each in writing.sentences(writing.prose(page)) if each] == [
        "# A b", "One two.", "Three CODE:", "- seven eight nine", "ten",
    ]  # fmt: skip
    assert writing.OF_PERSONS.search("an operator who drains") is None
    assert writing.OF_PERSONS.search("It ends; who has no tokens waits")
    assert writing.OF_PERSONS.search("a process who waits")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('"""Steps of a mesh."""', None),
        ('"""' + "word " * 16 + '"""', "16 words in the first line"),
        ('"""Of heartbeats."""', "begins with 'Of'"),
        ('LOG = "the worker is told"', "'is told'"),
    ],
)
def test_texts_of_code_against_the_rules_are_found(
    text: str, wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "ROOT", tmp_path)
    path = tmp_path / "code.py"
    path.write_text(text)
    found = list(writing.wrong_in(path))
    assert len(found) == (wrong is not None)
    assert wrong is None or wrong in found[0]


def test_long_sentences_of_pages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n" + "word " * 25 + "word.\n\nShort. A process who waits.\n")
    found = list(writing.wrong_in_page(page))
    assert len(found) == 2
    assert "more than 25 words" in found[1]
