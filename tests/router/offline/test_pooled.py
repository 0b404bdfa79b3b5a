"""Texts of ``lockstep embed``, and its flags."""

from __future__ import annotations

import pytest

from router.tools.embed import EmbedConfig, texts_of


def test_lines_are_texts_json_strings_or_objects() -> None:
    assert [*texts_of([b"one two\n", b"three\r\n"], is_json=False)] == ["one two", "three"]
    lines = [b'"one"\n', b'{"text": "two", "id": 7}\n', b'{"input": "three"}']
    assert [*texts_of(lines, is_json=True)] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("line", "is_json"),
    [(b"\n", False), (b"\xff\xfe\n", False), (b"{", True), (b'{"text": 3}', True), (b'{"id": 3}', True)],
)
def test_a_line_without_a_text_is_named(line: bytes, is_json: bool) -> None:
    with pytest.raises(ValueError, match="line 2"):
        list(texts_of([b'"a"', line], is_json=is_json))


def test_flags_without_files_are_refused() -> None:
    with pytest.raises(ValueError, match="FILE"):
        EmbedConfig(output_file="x.npy")
    with pytest.raises(ValueError, match=r"VECTORS\.npy"):
        EmbedConfig(file="x.txt", output_file="x.parquet")
