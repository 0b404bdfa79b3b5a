"""Loads for a few instances of a small model on one host.

``rate`` is requests a second in all.

Real meshes get them (``--real``), and simulated ones that share cores (``--cores``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from examples.benchmarks.routing.workloads import Arrival, Conversation, Load, words

NUM_BLOCKS = 600
"""Blocks of 16 tokens in the KV cache of each instance."""
NUM_SEQS = 32
"""Requests that an instance runs at once."""
NUM_TOKENS = 512
"""Most tokens of a step: the default on a CPU."""


def hot_prefix(rng: random.Random, seconds: float, rate: float) -> Load:
    """Prompts that begin with one of 16 documents, drawn by Zipf's law.

    A cache holds seven.
    """
    documents = [_words(rng, 1200) for _ in range(16)]
    weights = [1 / (place + 1) for place in range(len(documents))]
    found = []
    for at in _arrivals(rng, seconds, rate):
        document = rng.choices(documents, weights)[0]
        found.append(Arrival(at, [*document, *_words(rng, rng.randint(16, 128))], 16))
    return found


def multi_turn(rng: random.Random, seconds: float, rate: float) -> Load:
    """Conversations of 3 to 6 turns, which share one of two system prompts."""
    systems = [_words(rng, 256) for _ in range(2)]
    found = []
    for number, at in enumerate(_arrivals(rng, seconds, rate / 4.5)):
        turns = [(_words(rng, rng.randint(40, 200)), rng.randint(8, 32)) for _ in range(rng.randint(3, 6))]
        found.append(Conversation(at, rng.choice(systems), turns, 0.5, f"s{number}"))
    return found


def uniform_burst(rng: random.Random, seconds: float, rate: float) -> Load:
    """Bursts of 24 equal requests, which share nothing."""
    return [
        Arrival(24 / rate * burst + rng.random() * 0.005, _words(rng, 256), 16)
        for burst in range(int(seconds * rate / 24))
        for _ in range(24)
    ]


def heavy_tail(rng: random.Random, seconds: float, rate: float) -> Load:
    """Lengths of prompts and answers are log-normal."""
    found = []
    for at in _arrivals(rng, seconds, rate):
        length = min(1800, max(16, int(rng.lognormvariate(5.0, 1.2))))
        found.append(Arrival(at, _words(rng, length), min(128, max(4, int(rng.lognormvariate(2.7, 1.0))))))
    return found


HOST_LOADS: dict[str, Callable[[random.Random, float, float], Load]] = {
    "uniform burst": uniform_burst,
    "heavy tail": heavy_tail,
    "multi-turn": multi_turn,
    "hot prefix": hot_prefix,
}


def _words(rng: random.Random, count: int) -> list[int]:
    return [5 + word % 4000 for word in words(rng, count)]


def _arrivals(rng: random.Random, seconds: float, rate: float) -> Iterator[float]:
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)
