"""Loads of the comparison.

All are made from a seed; token ids are random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec


class Arrival(msgspec.Struct, frozen=True):
    """One request, with its time ``at`` in seconds."""

    at: float
    prompt: list[int]
    output: int
    session: str = ""


class Conversation(msgspec.Struct, frozen=True):
    """Turns of one client: each prompt is the whole conversation and some new words."""

    at: float
    system: list[int]
    turns: list[tuple[list[int], int]]
    """Turns: (new words, tokens of the answer)."""
    pause: float
    """Seconds between an answer and the next turn."""
    session: str


Load = Sequence[Arrival | Conversation]


def _count(each: int, num_instances: int) -> int:
    """Number of requests in all, so many for each instance.

    Half of that for many instances, to be done sooner.
    """
    return each * num_instances // (1 if num_instances <= 16 else 2)


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(30) for _ in range(count)]


def small_ids(load: Load) -> Load:
    """The same load with token ids of a vocabulary of 4096."""

    def of(ids: Sequence[int]) -> list[int]:
        return [5 + word % 4000 for word in ids]

    return [
        msgspec.structs.replace(item, prompt=of(item.prompt))
        if isinstance(item, Arrival)
        else msgspec.structs.replace(
            item, system=of(item.system), turns=[(of(new), output) for new, output in item.turns]
        )
        for item in load
    ]


def uniform_burst(rng: random.Random, num_instances: int, scale: float) -> Load:
    """Bursts of 16 requests for each instance at once; equal prompts in length, nothing shared."""
    return [
        Arrival(burst * 1.0 * scale + rng.random() * 0.005 * scale, words(rng, 512), 64)
        for burst in range(5 if num_instances <= 16 else 2)
        for _ in range(16 * num_instances)
    ]


def heavy_tail(rng: random.Random, num_instances: int, scale: float) -> Load:
    """Poisson arrivals; lengths of prompts and answers are log-normal: a few are very long."""
    at, found = 0.0, []
    for _ in range(_count(80, num_instances)):
        at += rng.expovariate(num_instances * 20.0 / scale)
        length = min(16_000, max(16, int(rng.lognormvariate(5.8, 1.3))))
        output = min(1000, max(4, int(rng.lognormvariate(4.2, 1.0))))
        found.append(Arrival(at, words(rng, length), output))
    return found


def multi_turn(rng: random.Random, num_instances: int, scale: float) -> Load:
    """Conversations of 3 to 9 turns, which share one of four system prompts."""
    systems = [words(rng, 512) for _ in range(4)]
    at, found = 0.0, []
    for number in range(_count(16, num_instances)):
        at += rng.expovariate(num_instances * 4.5 / scale)
        turns = [(words(rng, rng.randint(50, 400)), rng.randint(20, 150)) for _ in range(rng.randint(3, 9))]
        found.append(Conversation(at, rng.choice(systems), turns, 0.5 * scale, f"s{number}"))
    return found


def hot_prefix(rng: random.Random, num_instances: int, scale: float) -> Load:
    """Prompts that begin with one of 40 documents, drawn by Zipf's law.

    The first document is in every fourth prompt.
    """
    documents = [words(rng, 2048) for _ in range(40)]
    weights = [1 / (place + 1) for place in range(len(documents))]
    at, found = 0.0, []
    for _ in range(_count(100, num_instances)):
        at += rng.expovariate(num_instances * 30.0 / scale)
        document = rng.choices(documents, weights)[0]
        found.append(Arrival(at, [*document, *words(rng, rng.randint(32, 256))], rng.randint(16, 96)))
    return found


def small_caches(rng: random.Random, num_instances: int, scale: float) -> Load:
    """Documents that fit into all caches together if each is kept only once.

    An instance holds eight. Requests come as fast as can just be served if they find them.
    """
    documents = [words(rng, 1200) for _ in range(8 * num_instances)]
    weights = [1 / (place + 1) for place in range(len(documents))]
    at, found = 0.0, []
    for _ in range(_count(200, num_instances)):
        at += rng.expovariate(num_instances * 35.0 / scale)
        document = rng.choices(documents, weights)[0]
        found.append(Arrival(at, [*document, *words(rng, rng.randint(16, 128))], 16))
    return found


LOADS: dict[str, Callable[[random.Random, int, float], Load]] = {
    "uniform burst": uniform_burst,
    "heavy tail": heavy_tail,
    "multi-turn": multi_turn,
    "hot prefix": hot_prefix,
    "small caches": small_caches,
}
SMALLER: dict[str, dict[str, int]] = {"small caches": {"num_blocks": 600, "max_num_seqs": 32}}
"""Resources of instances under a load that are less than those of ``Machine``."""
