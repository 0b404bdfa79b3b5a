"""The chooser against real engine cores on a virtual clock: nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from examples.benchmarks.bench_routing import GPU
from examples.benchmarks.routing.cluster import DELAY, Cluster, Machine
from examples.benchmarks.routing.outcome import Outcome
from examples.benchmarks.routing.report import percentile
from examples.benchmarks.routing.workloads import Arrival, Conversation, words

SMALL = Machine(GPU, num_blocks=600, max_num_seqs=6)
"""So few slots and blocks that requests queue, are preempted, and prefixes are evicted."""


POLICIES = ("prefix_aware", "round_robin")


def talks(rng: random.Random) -> list[Arrival | Conversation]:
    system = words(rng, 256)
    return [
        Conversation(
            rng.random() * 4,
            system,
            [(words(rng, rng.randint(30, 120)), 40) for _ in range(4)],
            0.2,
            f"s{number}",
        )
        for number in range(24)
    ]


def crowd(rng: random.Random) -> list[Arrival | Conversation]:
    """Answers of very different lengths, so that slots become free sooner here than there."""
    return [
        Arrival(rng.random() * 2, words(rng, rng.randint(50, 900)), rng.choice([4, 8, 400]))
        for _ in range(120)
    ]


def served(policy: str, load: Sequence[Arrival | Conversation], **options: bool) -> list[Outcome]:
    """Outcomes of all requests, of which nothing is left in the instances."""
    cluster = Cluster(policy, 4, SMALL, **options)
    outcomes = cluster.run(load)
    assert all(0 < each.first_token <= each.end for each in outcomes)
    cluster.check_clean()
    return outcomes


def hit_rate(outcomes: Sequence[Outcome]) -> float:
    return sum(each.cached_tokens for each in outcomes) / sum(each.prompt_tokens for each in outcomes)


def ttft(outcomes: Sequence[Outcome], share: float) -> float:
    return percentile([each.first_token - each.arrival for each in outcomes], share)


@pytest.mark.parametrize("policy", ["prefix_aware", "least_loaded", "power_of_two", "consistent_hash"])
def test_everybody_is_served_once_and_the_index_is_exact(policy: str) -> None:
    outcomes = served(policy, [*talks(random.Random(1)), *crowd(random.Random(2))])
    assert len(outcomes) == 24 * 4 + 120


def test_conversations_find_their_prefixes_and_their_first_tokens_sooner() -> None:
    aware, blind = (
        served("prefix_aware", talks(random.Random(3))),
        served("round_robin", talks(random.Random(3))),
    )
    assert hit_rate(aware) > hit_rate(blind) + 0.15
    assert ttft(aware, 0.99) < ttft(blind, 0.99)


def documents(rng: random.Random) -> list[Arrival]:
    """As many prompts as the caches hold once each, and requests as fast as possible.

    More requests could not be served then.
    """
    texts = [words(rng, 1200) for _ in range(28)]
    weights = [1 / (place + 1) for place in range(len(texts))]
    return [
        Arrival(number / 140, [*rng.choices(texts, weights)[0], *words(rng, rng.randint(16, 128))], 16)
        for number in range(560)
    ]


def test_documents_are_kept_once_where_caches_are_small() -> None:
    """Copies would evict what is wanted next, and it would be computed again."""
    machine = Machine(GPU, num_blocks=600, max_num_seqs=32)
    aware, blind = (Cluster(policy, 4, machine).run(documents(random.Random(5))) for policy in POLICIES)
    assert hit_rate(aware) > hit_rate(blind) + 0.2
    assert ttft(aware, 0.99) < 0.2 * ttft(blind, 0.99)


def test_steps_that_share_cores_take_longer_together() -> None:
    def times(cores: float | None, at: float) -> list[float]:
        load = [Arrival(0.0, words(random.Random(1), 500), 1), Arrival(at, words(random.Random(2), 500), 1)]
        outcomes = Cluster("round_robin", 2, Machine(GPU, cores=cores)).run(load)
        return [each.first_token - each.arrival - 2 * DELAY for each in outcomes]

    alone = GPU.base + 500 * (GPU.per_token + GPU.per_context)
    assert times(None, 0.0) == pytest.approx([alone, alone])
    assert times(2, 0.0) == pytest.approx([alone, alone])
    assert times(1, 0.0) == pytest.approx([2 * alone, 2 * alone])
    assert times(1, alone / 2) == pytest.approx([1.5 * alone, 1.5 * alone])


def test_queued_requests_move_and_wait_less() -> None:
    moving = served("prefix_aware", crowd(random.Random(4)))
    staying = served("prefix_aware", crowd(random.Random(4)), moves=False)
    assert sum(each.moves for each in moving) > 0
    assert ttft(moving, 0.99) < ttft(staying, 0.99)
