"""Tokenizers in other forms than tokenizer.json: converted once, by another process."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.model import tokenizer_files
from engine.model.checkpoint import fingerprint, read_model_info
from engine.model.tokenizer_files import TokenizerFilesError, tokenizer_directory
from router.text.tokens import TokenizerError, load_tokenizer
from tests.router import tiny_tokenizer

TEXTS = ["Hello world! How are you today?", "one  two\n\nthree 1234", "Zoë ☃ naïve", " leading", ""]
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RANKS = [bytes([byte]) for byte in range(256)] + [b"He", b"ll", b"Hell", b"Hello", b" w", b"or", b" wor"]
"""A vocabulary of bytes, and pieces in the order in which they are merged."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    return tmp_path / "model"


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def write_tekken(directory: Path) -> None:
    """As Mistral publishes it: the special tokens come first."""
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(RANKS)
    ]
    write(
        directory / "tekken.json",
        {
            "config": {
                "pattern": PATTERN,
                "num_vocab_tokens": len(RANKS),
                "default_vocab_size": len(RANKS) + len(special),
                "default_num_special_tokens": len(special),
                "version": "v7",
            },
            "vocab": vocabulary,
            "special_tokens": [
                {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)
            ],
        },
    )


def write_tiktoken(directory: Path) -> None:
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(RANKS)]
    (directory / "tokenizer.model").write_text("\n".join(lines) + "\n")
    write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_plain(directory: Path) -> Tokenizer:
    """vocab.json and merges.txt, as old GPT-2 and its like have them.

    Returns what they are of.
    """
    backend = tiny_tokenizer.byte_level()
    model = json.loads(backend.to_str())["model"]
    write(directory / "vocab.json", model["vocab"])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    write(directory / "config.json", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<eos>"}
    write(directory / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **names})
    return backend


def encoded(directory: Path, text: str) -> list[int]:
    return load_tokenizer(directory).encode(text, add_special_tokens=False)


def test_a_directory_with_tokenizer_json_is_taken_as_it_is(directory: Path, cache: Path) -> None:
    tiny_tokenizer.byte_level().save(str(directory / "tokenizer.json"))
    assert tokenizer_directory(directory) == directory
    assert not cache.exists()


def test_a_vocabulary_with_merges(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = write_plain(directory)
    made = load_tokenizer(directory)
    for text in TEXTS:
        assert (
            made.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids
        )
        assert made.decode(made.encode(text, add_special_tokens=False)) == text
    assert made.special_tokens["eos_token"] == "<eos>"
    assert made.eos_id == tiny_tokenizer.EOS

    def convert(*_arguments: object) -> None:
        raise AssertionError("converted a second time")

    monkeypatch.setattr(tokenizer_files, "_convert", convert)
    assert encoded(directory, TEXTS[0])
    (directory / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(AssertionError, match="a second time"):
        load_tokenizer(directory)


def test_tekken(directory: Path) -> None:
    write_tekken(directory)
    made = load_tokenizer(directory)
    assert encoded(directory, "Hello wor") == [3 + RANKS.index(b"Hello"), 3 + RANKS.index(b" wor")]
    for text in TEXTS:
        assert made.decode(made.encode(text, add_special_tokens=False)) == text


def test_tiktoken(directory: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    write_tiktoken(directory)
    ranks = {piece: rank for rank, piece in enumerate(RANKS)}
    own = tiktoken.Encoding("tiny", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        assert encoded(directory, text) == own.encode(text)


def test_sentencepiece(directory: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    corpus = directory / "corpus"
    corpus.write_text("\n".join(tiny_tokenizer.CORPUS * 8))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        minloglevel=2,
    )
    write(directory / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})
    own = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    made = load_tokenizer(directory)
    for text in (*tiny_tokenizer.CORPUS, *TEXTS[:3]):
        assert made.encode(text, add_special_tokens=False) == own.encode(text)
        assert made.encode(text, add_special_tokens=True) == [own.bos_id(), *own.encode(text)]


@pytest.mark.parametrize(
    ("content", "missing"),
    [(b"SGVsbG8= 0\n", "tiktoken"), (b"\n\x0e\n\x05<unk>", "sentencepiece and protobuf")],
)
def test_a_package_that_is_missing_is_named(
    content: bytes, missing: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "_has", lambda module: False)
    (directory / "tokenizer.model").write_bytes(content)
    install = missing.replace(" and", "")
    with pytest.raises(TokenizerError, match=f"reading that needs {missing}: pip install {install}, or name"):
        load_tokenizer(directory)


def test_a_tokenizer_that_is_code_is_not_run(directory: Path) -> None:
    write_tiktoken(directory)
    auto_map = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    write(directory / "tokenizer_config.json", {"auto_map": auto_map})
    with pytest.raises(TokenizerFilesError, match="code of its own, which is not run"):
        tokenizer_directory(directory)


def test_a_file_that_cannot_be_converted(directory: Path, cache: Path) -> None:
    write(directory / "tekken.json", {})
    with pytest.raises(TokenizerFilesError, match=r"transformers cannot convert tekken\.json of .*KeyError"):
        tokenizer_directory(directory)
    assert not list((cache / "lockstep" / "tokenizers").iterdir())


def test_no_tokenizer_at_all(directory: Path) -> None:
    with pytest.raises(TokenizerFilesError, match=r"has no tokenizer\.json"):
        tokenizer_directory(directory)


def test_a_cache_that_cannot_be_written(directory: Path, cache: Path) -> None:
    write_tekken(directory)
    cache.write_text("a file where the directory should be")
    with pytest.raises(TokenizerFilesError, match=r"cannot be converted: .*Not a directory"):
        tokenizer_directory(directory)


def test_who_has_it_converted_loads_neither_torch_nor_transformers(directory: Path) -> None:
    write_tekken(directory)
    code = (
        "import sys; from pathlib import Path; from router.text.tokens import load_tokenizer; "
        "load_tokenizer(Path(sys.argv[1])); print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_another_tokenizer_is_another_model(directory: Path) -> None:
    write_tekken(directory)
    write(
        directory / "config.json",
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000},
    )
    info = read_model_info(directory, weights=False)
    before = fingerprint(info, weights=False)
    write(directory / "tekken.json", {"config": "another"})
    assert fingerprint(info, weights=False) != before
