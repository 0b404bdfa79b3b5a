"""Subjects of commits are measured."""

from __future__ import annotations

from tests.house.subjects import too_long


def test_only_subjects_over_72_characters_are_found() -> None:
    log = f"aaaa {'x' * 72}\nbbbb {'y' * 73}\ncccc short\n"
    assert [(found.where[:4], found.size) for found in too_long(log)] == [("bbbb", 73)]
    assert too_long("") == []
