"""Requests of all kinds, drawn at random (no torch)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from engine.messages import Submit
from engine.sampling import SamplingParams, ThinkingBudget
from tests.engine.scheduling.test_grammar import COLOUR, JSON, LETTERS, PLATE

FIRST_TOKEN = 4
"""Tokens before it are special ones."""
GRAMMARS = (JSON, PLATE, COLOUR, LETTERS)
TIED = 1e-30
"""Temperature so low that chance decides between equal logits only."""


def text(chance: random.Random, length: int, vocab_size: int) -> list[int]:
    """Token ids, some of which recur, so that there is something to draft."""
    piece = [chance.randrange(FIRST_TOKEN, vocab_size) for _ in range(chance.randrange(2, 9))]
    ids: list[int] = []
    while len(ids) < length:
        ids += piece if chance.random() < 0.4 else [chance.randrange(FIRST_TOKEN, vocab_size)]
    return ids[:length]


def sampling(chance: random.Random, *, greedy: bool) -> dict[str, Any]:
    """How tokens are drawn."""
    if greedy:
        return {"temperature": 0.0}
    drawn: dict[str, Any] = {"temperature": chance.choice([TIED, 0.05, 0.7, 0.7, 1.0, 1.0, 1.5])}
    if chance.random() < 0.3:
        drawn["top_k"] = chance.choice([1, 5, 40])
    if chance.random() < 0.3:
        drawn["top_p"] = chance.choice([0.3, 0.9, 0.99])
    if chance.random() < 0.2:
        drawn["min_p"] = chance.choice([0.01, 0.2])
    return drawn


def rules(chance: random.Random, vocab_size: int) -> dict[str, Any]:
    """What else shapes the logits: of most requests little."""

    def some(count: int) -> list[int]:
        return [chance.randrange(FIRST_TOKEN, vocab_size) for _ in range(count)]

    drawn: dict[str, Any] = {}
    if chance.random() < 0.3:
        drawn["repetition_penalty"] = chance.choice([0.8, 1.1, 1.5])
    if chance.random() < 0.2:
        drawn |= {"presence_penalty": chance.uniform(-1, 1), "frequency_penalty": chance.uniform(-1, 1)}
    if chance.random() < 0.2:
        drawn["logit_bias"] = {token: chance.uniform(-5, 5) for token in some(20)}
    if chance.random() < 0.15:
        drawn["stop_token_ids"] = tuple(some(12))
    if chance.random() < 0.2:
        drawn["min_tokens"] = chance.randrange(1, 8)
    if chance.random() < 0.1:
        drawn["bad_words"] = ((some(1)[0],), *((token, some(1)[0]) for token in some(40)))
    if chance.random() < 0.25:
        return drawn | {"grammar": chance.choice(GRAMMARS)}
    if chance.random() < 0.1:
        drawn["allowed_token_ids"] = tuple(some(50))
    if chance.random() < 0.1:
        drawn["thinking"] = ThinkingBudget(tokens=3, begin=(), end=(7, 8))
    return drawn | {"ignore_eos": chance.random() < 0.7}


def shown(chance: random.Random) -> dict[str, Any]:
    """Log-probabilities that are asked for."""
    drawn: dict[str, Any] = {}
    if chance.random() < 0.6:
        drawn["logprobs"] = chance.choice([0, 1, 5, 20])
    if chance.random() < 0.2:
        drawn["prompt_logprobs"] = chance.choice([0, 3])
    return drawn


def requests(
    seed: int, *, count: int, vocab_size: int, longest: int, most: int, greedy: bool | None = None
) -> list[Submit]:
    """Mixed requests: a third begins alike, and some are further samples of the one before.

    ``longest``: tokens of a prompt, of those that do not begin alike; ``most``: tokens of an answer;
    ``greedy``: whether they are all greedy, or none; None draws it.
    """
    chance = random.Random(seed)
    shared = text(chance, min(70, longest), vocab_size)
    found: list[Submit] = []
    while len(found) < count:
        length = chance.choice([1, 2, 15, 16, 17, chance.randrange(1, longest + 1)])
        prompt = (shared if chance.random() < 0.33 else []) + text(chance, length, vocab_size)
        is_greedy = chance.random() < 0.4 if greedy is None else greedy
        drawn = sampling(chance, greedy=is_greedy) | rules(chance, vocab_size) | shown(chance)
        drawn["max_tokens"] = max(drawn.get("min_tokens", 1), chance.randrange(1, most + 1))
        samples = 1 if is_greedy else chance.choice([1, 1, 1, 2, 4])
        number = chance.choice([chance.getrandbits(63), chance.randrange(100)])
        for index in range(min(samples, count - len(found))):
            found.append(
                Submit(
                    request=len(found),
                    request_id=f"r{len(found)}",
                    prompt_ids=prompt,
                    params=SamplingParams(**drawn),
                    seed=number,
                    sample_index=index,
                    priority=chance.randrange(3),
                )
            )
    return found


def longest_of(submits: Sequence[Submit]) -> int:
    """Tokens of the longest of these requests with its answer."""
    return max(len(each.prompt_ids) + (each.params.max_tokens or 0) for each in submits)
