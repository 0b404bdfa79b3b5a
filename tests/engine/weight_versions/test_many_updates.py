"""Twenty updates under fetches: no block of an older version is hit."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from coordinator.messages import InFlight
from engine.kernels.core import library
from engine.messages import Submit
from engine.weight_versions import shard_weights
from tests.engine.invariance.answers import ALONE, Answer
from tests.engine.states.serving import serve
from tests.engine.states.test_transfers import prompt
from tests.engine.weight_versions.test_versions_apart import Changing, Model, is_cheap, model
from tests.nightly import NIGHTLY

__all__ = ["is_cheap", "model"]
pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

UPDATES = 20 if NIGHTLY else 8
PREFIXES = [[(7 + 2 * each) * number % 380 + 5 for number in range(96)] for each in range(3)]


class Rollouts:
    """Requests of one instance, and the version that made each token."""

    def __init__(self, serving: Changing) -> None:
        self.serving = serving
        self.submits: dict[int, Submit] = {}
        self.spans: dict[int, list[tuple[int, int, bool]]] = {}
        """Version from each token on, and whether it alone computed what stands before, by request."""

    def submit(self, submits: list[Submit], blocks_at: str) -> None:
        self.serving.submit(submits, blocks_at)
        for each in submits:
            self.submits[each.request] = each
            self.spans[each.request] = [(0, self.serving.version, True)]

    def update(self, version: int, in_flight: InFlight) -> None:
        running = {each.key[1] for each in self.serving.core.scheduler.queues.running}
        self.serving.update(version, in_flight)
        for number, spans in self.spans.items():
            if self.serving.found[number].ended == (None, None):
                is_new = in_flight is InFlight.RECOMPUTE or number not in running
                spans.append((len(self.serving.found[number].token_ids), version, is_new))

    def check(self, model: Model) -> int:
        """Compare all tokens with those of instances that have one version; returns how many."""
        count = 0
        for number, spans in self.spans.items():
            found = self.serving.found[number]
            ends = [*(begin for begin, _, _ in spans[1:]), len(found.token_ids)]
            for (begin, version, is_new), end in zip(spans, ends, strict=True):
                if is_new and begin < end:
                    resumed = msgspec.structs.replace(
                        self.submits[number], output_ids=found.token_ids[:begin]
                    )
                    alone = model.fresh(version).answers([resumed], ALONE)[0][number]
                    assert part(found, begin, end) == part(alone, begin, end, begin), (number, spans)
                    count += end - begin
        return count


def part(answer: Answer, begin: int, end: int, missing: int = 0) -> object:
    """Ids and log-probabilities of some tokens; those of the first ``missing`` were never made."""
    return answer.token_ids[begin:end], answer.logprobs[begin - missing : end - missing]


@pytest.mark.parametrize("seed", range(8 if NIGHTLY else 1))
def test_no_block_of_an_older_version_is_hit(
    model: Model, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_weights, "beside_steps", lambda read: read())  # nothing else is to be done
    rng = random.Random(seed)
    pair = [Changing(model, number, tmp_path / str(number)) for number in (0, 1)]
    rollouts = [Rollouts(each) for each in pair]

    def turn(count: int) -> None:
        for _ in range(count):
            for each in pair:
                each.turn()

    def arrive() -> None:
        at = rng.randrange(2)
        wanted = []
        for _ in range(rng.randint(1, 3)):
            number = sum(len(each.submits) for each in rollouts) + len(wanted)
            tail = [rng.randrange(5, 380) for _ in range(rng.randint(3, 40))]
            wanted.append(prompt([*rng.choice(PREFIXES), *tail], number, rng.randint(1, 8)))
        rollouts[at].submit(wanted, pair[1 - at].mover.address if rng.random() < 0.7 else "")

    for update in range(1, UPDATES + 1):
        for _ in range(rng.randint(1, 4)):
            arrive()
            turn(rng.choice((0, 1, 4, 40)))
        for at in rng.sample((0, 1), 2):
            rollouts[at].update(update % 2, rng.choice((InFlight.RECOMPUTE, InFlight.KEEP)))
            turn(rng.randint(0, 6))
    serve(*pair)
    assert sum(each.check(model) for each in rollouts) > 5 * UPDATES
    assert all(len(each.serving.found) == len(each.submits) for each in rollouts)
    assert sum(each.counters.fetched_tokens for each in pair) > 0, "some prefixes were fetched"
    assert [each.counters.wrong_blocks for each in pair] == [0, 0]
    for each in pair:
        each.close()
