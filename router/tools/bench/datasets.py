"""Datasets of a benchmark (pure): random tokens, shared prefixes, ShareGPT, conversations."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

Prompt = list[int] | str

LOWEST_ID = 16
"""Lowest token id that prompts use, since special tokens often are below."""
CHARACTERS_PER_TOKEN = 4
"""Rough characters per token of English text, where no tokenizer was given."""
SHORTEST, LONGEST, LONGEST_IN_ALL = 4, 1024, 2048
"""Tokens of a ShareGPT prompt, and with its answer, that are used (vLLM's limits)."""


class BenchRequest(msgspec.Struct, frozen=True):
    """One request, or one turn of a conversation."""

    prompt: Prompt
    output_len: int
    """Tokens to generate."""


Conversation = list[BenchRequest]
"""Prompts sent one after another; each later one continues the whole conversation before it."""


class PromptLengths(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of prompts and answers in tokens."""

    input_len: int = 128
    output_len: int = 64
    prefix_len: int = 0
    """Tokens of a prefix that all prompts share, on top of ``input_len``."""
    range_ratio: float = 0.0
    """Lengths are uniform in [len * (1 - ratio), len * (1 + ratio)]."""
    vocab: int = 4096
    as_text: bool = False
    """Prompts of random words, which are more tokens than that."""
    num_turns: int = 1


def random_prompts(shape: PromptLengths, rng: random.Random, count: int) -> list[Conversation]:
    """Random tokens behind one prefix; ``num_turns`` of them make a conversation."""
    prefix = _ids(rng, shape.prefix_len, shape)
    found = []
    for _ in range(count):
        turns = []
        for turn in range(shape.num_turns):
            ids = _ids(rng, _length(shape.input_len, shape.range_ratio, rng), shape)
            prompt = prefix + ids if turn == 0 else ids
            turns.append(
                BenchRequest(
                    _as_prompt(prompt, shape.as_text or shape.num_turns > 1),
                    _length(shape.output_len, shape.range_ratio, rng),
                )
            )
        found.append(turns)
    return found


def prefix_repetition(
    shape: PromptLengths, rng: random.Random, count: int, *, num_prefixes: int, suffix_len: int
) -> list[Conversation]:
    """``num_prefixes`` prefixes of ``shape.prefix_len`` tokens, each before about as many random suffixes, in
    random order."""
    prefixes = [_ids(rng, shape.prefix_len, shape) for _ in range(num_prefixes)]
    found = [
        [
            BenchRequest(
                _as_prompt(prefixes[i % num_prefixes] + _ids(rng, suffix_len, shape), shape.as_text),
                shape.output_len,
            )
        ]
        for i in range(count)
    ]
    rng.shuffle(found)
    return found


def sharegpt(
    file: Path,
    rng: random.Random,
    count: int,
    *,
    output_len: int | None = None,
    num_tokens: Callable[[str], int] = lambda text: len(text) // CHARACTERS_PER_TOKEN,
) -> list[Conversation]:
    """First questions of a ShareGPT file, in random order.

    Answers are as long as those in the file, unless ``output_len`` is given. A file with too few questions is
    used again.

    Raises:
        ValueError: the file cannot be read, or has nothing of a usable length.
    """
    try:
        entries = json.loads(file.read_bytes())
        pairs = list(_first_turns(entries))
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"{file} is no ShareGPT file, [{{'conversations': [{{'from', 'value'}}, ...]}}, ...]: {error}"
        ) from error
    rng.shuffle(pairs)
    found: list[Conversation] = []
    for question, reply in pairs:
        asked, wanted = num_tokens(question), output_len or num_tokens(reply)
        if asked < SHORTEST or asked > LONGEST or wanted < SHORTEST or asked + wanted > LONGEST_IN_ALL:
            continue
        found.append([BenchRequest(question, wanted)])
        if len(found) == count:
            return found
    if not found:
        raise ValueError(f"{file} has no question of {SHORTEST} to {LONGEST} tokens with an answer")
    return [found[number % len(found)] for number in range(count)]


def _first_turns(entries: list[Any]) -> Iterator[tuple[str, str]]:
    """First question and answer of each conversation that has both."""
    for entry in entries:
        turns = entry.get("conversations") or entry.get("conversation") or []
        texts = [turn["value"] for turn in turns[:2]]
        if len(texts) == 2 and all(isinstance(text, str) for text in texts):
            yield texts[0], texts[1]


def _ids(rng: random.Random, count: int, shape: PromptLengths) -> list[int]:
    return [rng.randrange(LOWEST_ID, shape.vocab) for _ in range(count)]


def _length(mean: int, ratio: float, rng: random.Random) -> int:
    if not ratio:
        return mean
    return rng.randint(max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio))))


def _as_prompt(ids: list[int], as_text: bool) -> Prompt:
    return " ".join(f"{token_id:x}" for token_id in ids) if as_text else ids
