"""Text to ids and back."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from router.text.tokens import MAX_PENDING, DecodingDetokenizer, Tokenizer, TokenizerError, load_tokenizer
from tests.router import tiny_tokenizer
from tests.router.tiny_tokenizer import BOS, EOS

TINY = Tokenizer(tiny_tokenizer.byte_level(), {})
PIECES = Tokenizer(tiny_tokenizer.sentence_piece(), {})


def incremental(
    tokenizer: Tokenizer, ids: list[int], prompt_ids: Sequence[int] = (), **options: bool
) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt_ids, **options)
    return [*(detokenizer.step(id) for id in ids), detokenizer.flush()]


def piece_id(piece: str) -> int:
    """The token of a piece of the other tokenizer."""
    id = PIECES.backend.token_to_id(piece)
    assert id is not None
    return id


def byte_pieces(text: str) -> list[int]:
    """A text as that tokenizer's tokens for bytes."""
    return [piece_id(f"<0x{byte:02X}>") for byte in text.encode()]


def byte_id(byte: int) -> int:
    """The token of one byte."""
    return next(id for id in range(TINY.size) if TINY.token_bytes(id) == bytes([byte]))


def test_encode_and_decode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world!", add_special_tokens=True)
    assert ids[0] == BOS
    assert ids[1:] == tokenizer.encode("Hello world!", add_special_tokens=False)
    assert tokenizer.decode(ids) == "<bos>Hello world!"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello world!"
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}


@given(st.text(max_size=40))
def test_pieces_of_text_add_up(text: str) -> None:
    ids = TINY.encode(text, add_special_tokens=False)
    pieces = incremental(TINY, ids)
    assert "".join(pieces) == TINY.decode(ids)
    assert b"".join(TINY.token_bytes(id) for id in ids).decode() == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@given(st.lists(st.integers(0, TINY.size + 20), max_size=60))
def test_any_tokens_can_be_detokenised(ids: list[int]) -> None:
    assert "".join(incremental(TINY, ids)).count("\ufffd") <= sum(len(TINY.token_bytes(id)) for id in ids)


@given(st.lists(st.integers(0, TINY.size + 5), max_size=40), st.booleans())
def test_a_table_of_bytes_says_what_decoding_says(ids: list[int], skip_special_tokens: bool) -> None:
    pieces = incremental(TINY, ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == TINY.decode(ids, skip_special_tokens=skip_special_tokens)
    slow = DecodingDetokenizer(TINY, skip_special_tokens=skip_special_tokens)
    text = "".join([*(slow.step(id) for id in ids), slow.flush()])
    assert text.replace("\ufffd", "") == "".join(pieces).replace("\ufffd", "")


@given(st.lists(st.integers(0, PIECES.size - 1), max_size=60))
def test_any_pieces_can_be_detokenised(ids: list[int]) -> None:
    incremental(PIECES, ids)


def test_characters_come_out_whole() -> None:
    ids = TINY.encode("a🙂b", add_special_tokens=False)
    assert len(ids) == 6
    assert incremental(TINY, ids) == ["a", "", "", "", "🙂", "b", ""]


def test_an_unfinished_character_at_the_end_is_shown() -> None:
    ids = TINY.encode("a🙂", add_special_tokens=False)
    assert incremental(TINY, ids[:3]) == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_text_do_not_pile_up() -> None:
    pieces = incremental(TINY, [byte_id(0x80)] * (3 * MAX_PENDING))
    assert "".join(pieces) == "\ufffd" * (3 * MAX_PENDING)
    assert all(len(piece) <= MAX_PENDING for piece in pieces)


def test_special_tokens() -> None:
    ids = TINY.encode("Hello<eos>you", add_special_tokens=False)
    assert EOS in ids
    assert "".join(incremental(TINY, ids, skip_special_tokens=True)) == "Helloyou"
    assert "".join(incremental(TINY, ids, skip_special_tokens=False)) == "Hello<eos>you"
    assert "".join(incremental(TINY, [*[EOS] * 40, *ids])) == "Helloyou"


def test_the_prompts_tail_decides_on_a_leading_space() -> None:
    hello, world = (piece_id(piece) for piece in ("▁Hello", "▁world"))
    assert "".join(incremental(PIECES, [world], [hello])) == " world"
    assert "".join(incremental(PIECES, [world])) == "world"
    assert PIECES.token_text(world) == " world"


def test_byte_fallback() -> None:
    ids = byte_pieces("é")
    assert incremental(PIECES, ids) == ["", "é", ""]
    assert [PIECES.token_bytes(id) for id in ids] == [b"\xc3", b"\xa9"]
    broken = [ids[0], piece_id("!")]
    assert "".join(incremental(PIECES, [*ids, *broken, *ids])) == "é\ufffd!é"


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ([*byte_pieces("😀😀"), piece_id("</s>")], [piece_id("▁Hello")], " Hello"),
        ([piece_id("H"), *byte_pieces("漢漢\n")], [*byte_pieces("1."), piece_id("▁world")], "1. world"),
        ([piece_id("▁Hello"), *byte_pieces("漢" * 20)], byte_pieces("漢"), "漢"),
    ],
)
def test_a_prompt_that_ends_in_bytes(prompt: list[int], output: list[int], text: str) -> None:
    """A row of them is text or not as a whole, wherever it is cut."""
    assert "".join(incremental(PIECES, output, prompt)) == text


@pytest.mark.parametrize("before", ["", "Hello", "漢漢漢漢"])
@pytest.mark.parametrize("num_unfinished", [1, 2, 3])
@pytest.mark.parametrize("tokenizer", [TINY, PIECES], ids=["byte level", "byte fallback"])
def test_a_prompt_that_ends_within_a_character(
    tokenizer: Tokenizer, num_unfinished: int, before: str
) -> None:
    """The prompt's text is no part of the answer, nor is its unfinished end."""
    is_byte_level = tokenizer is TINY
    emoji = tokenizer.encode("🙂", add_special_tokens=False) if is_byte_level else byte_pieces("🙂")
    head = tokenizer.encode(before, add_special_tokens=False) if is_byte_level else byte_pieces(before)
    exclamation = tokenizer.encode("!", add_special_tokens=False)
    assert len(emoji) == 4
    prompt, rest = [*head, *emoji[:num_unfinished]], emoji[num_unfinished:]
    assert "".join(incremental(tokenizer, [*rest, *exclamation], prompt)) == "🙂!"
    assert "".join(incremental(tokenizer, exclamation * 2, prompt)) == "!!"
    assert "".join(incremental(tokenizer, [], prompt)) == ""


@given(st.text(max_size=12), st.text(min_size=1, max_size=12), st.integers(0, 48))
def test_prompt_and_output_add_up(prompt: str, output: str, cut: int) -> None:
    """Wherever a text is cut, the answer's text is what the prompt's lacks."""
    ids = TINY.encode(prompt + output, add_special_tokens=False)
    head, tail = ids[:cut], ids[cut:]
    whole = TINY.decode(head)
    while head and not (prompt + output).startswith(whole):
        head.pop()
        whole = TINY.decode(head)
    assert whole + "".join(incremental(TINY, tail, ids[:cut])) == prompt + output


@given(st.text(max_size=40))
def test_the_lower_bound_of_tokens_holds(text: str) -> None:
    assert TINY.fewest_tokens(text) <= len(TINY.encode(text, add_special_tokens=False))


def test_the_lower_bound_of_tokens() -> None:
    assert TINY.fewest_tokens("a" * 1000) > 50
    assert PIECES.fewest_tokens("a" * 1000) == 0
    composing = tiny_tokenizer.byte_level()
    composing.normalizer = normalizers.NFC()
    assert Tokenizer(composing, {}).fewest_tokens("a" * 1000) == TINY.fewest_tokens("a" * 1000) // 4
    composing.normalizer = normalizers.Strip()
    assert Tokenizer(composing, {}).fewest_tokens("a" * 1000) == 0


def test_ids_beyond_the_tokenizer_are_silent() -> None:
    assert TINY.token_bytes(TINY.size + 5) == b""
    assert incremental(TINY, [TINY.size + 5, byte_id(65)]) == ["", "A", ""]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"add_bos_token": False}, []),
        ({"add_bos_token": True}, [BOS]),
        ({"add_bos_token": True, "bos_token": None}, []),
        ({}, [BOS]),
    ],
)
def test_tokenizer_config_decides_on_bos(
    tmp_path: Path, config: dict[str, object], wanted: list[int]
) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer.write_model(tmp_path, **config))
    ids = tokenizer.encode("you", add_special_tokens=True)
    assert ids[: len(wanted)] == wanted
    assert len(ids) == len(wanted) + len(tokenizer.encode("you", add_special_tokens=False))


def test_eos_can_be_added(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer.write_model(tmp_path, add_bos_token=False, add_eos_token=True))
    assert tokenizer.encode("you", add_special_tokens=True)[-1] == EOS


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json: name a directory"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be used \(.*Model missing"):
        load_tokenizer(tmp_path)
    tiny_tokenizer.write_model(tmp_path)
    for content, message in (("{", "not valid JSON"), ("[]", "no JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(TokenizerError, match=message):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).config == {}


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    directory = tiny_tokenizer.write_model(tmp_path)
    saved = json.loads((directory / "tokenizer.json").read_text())
    saved["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (directory / "tokenizer.json").write_text(json.dumps(saved))
    assert len(load_tokenizer(directory).encode("one two three four", add_special_tokens=False)) > 2


@pytest.mark.parametrize("trims", [False, True])
def test_offsets_of_a_text(trims: bool) -> None:
    """Tokenizers may leave blanks out of them."""
    backend = tiny_tokenizer.byte_level()
    added = processors.TemplateProcessing("<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trims), added])
    tokenizer = Tokenizer(backend, {})
    text = "<|im_start|>user\n The dog 🙂 you<|im_end|>  !"
    ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens=True)
    assert ids == tokenizer.encode(text, add_special_tokens=True)
    assert (offsets[:3], offsets[-1]) == ([0, 0, len("<|im_start|>")], len(text))
    for id, offset in zip(ids[1:-1], offsets[1:-1], strict=True):
        assert text[offset:].startswith(tokenizer.token_text(id).replace("\ufffd", "🙂"))


def test_neither_torch_nor_transformers_is_loaded() -> None:
    code = "import sys, router.app.app; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def long_text(kind: str) -> str:
    rng = random.Random(kind)
    match kind:
        case "words":
            return " ".join(rng.choice(tiny_tokenizer.CORPUS) for _ in range(3000))
        case "digits":  # which some tokenizers group in threes, from the first one on
            return " ".join(str(rng.getrandbits(2000)) for _ in range(200))
        case _:
            return "".join(chr(rng.randrange(1, 0xD800)) for _ in range(100_000))


@pytest.mark.parametrize("kind", ["words", "digits", "characters"])
@pytest.mark.parametrize("tokenizer", [TINY, PIECES], ids=["bytes", "pieces"])
@pytest.mark.parametrize("count", [1, 100, 5000])
def test_a_part_of_a_text_has_the_tokens_of_the_whole(tokenizer: Tokenizer, kind: str, count: int) -> None:
    text = long_text(kind)
    whole = tokenizer.encode(text, add_special_tokens=True)
    for from_end in (True, False):
        part = tokenizer.encode_part(text, count, from_end=from_end, add_special_tokens=True)
        kept = slice(-count, None) if from_end else slice(count)
        assert part[kept] == whole[kept]
        assert len(part) < len(whole) / 2 or count == 5000


def test_a_text_of_few_tokens_is_encoded_whole() -> None:
    text = "sleeps " * 100
    whole = TINY.encode(text, add_special_tokens=True)
    assert TINY.encode_part(text, 5000, from_end=True, add_special_tokens=True) == whole
