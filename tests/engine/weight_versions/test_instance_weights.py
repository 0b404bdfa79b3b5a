"""New weights under running requests, and names of blocks that keep versions apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from coordinator.messages import InFlight, WeightUpdate, WeightVersion
from engine.core import EngineCore
from engine.kernels.core import library
from engine.messages import FinishReason, Submit
from engine.pieces.pool import prefix_names
from engine.sampling import SamplingParams
from engine.weight_versions.contract import WeightsRefused
from engine.weight_versions.instance_weights import InstanceWeights
from tests.engine.invariance.answers import ALONE, PEER, Answer, Answers, How, load, step
from tests.engine.weight_versions.made import trained
from tests.engine.weight_versions.test_shard_weights import answers, make

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

VERSIONS = 3


class Served:
    """Versions of one model, and the answers of fresh instances to a request."""

    def __init__(self, family: str, into: Path, **device: bool) -> None:
        self.device = device
        first = make(family, into / "0")
        self.directories = [first, *(trained(first, into / str(n), seed=n) for n in range(1, VERSIONS))]
        self.fresh = cache(lambda version: load(self.directories[version], **device))
        self.instance = load(first, **device)

    def alone(self, version: int, submit: Submit) -> Answer:
        """Answer of an instance that has a version alone."""
        return answers(self.fresh(version), [submit])[submit.request]


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    into = tmp_path_factory.mktemp(request.param)
    return Served(request.param, into, **({} if request.param == "llama" else {"batch_invariant": True}))


class Running:
    """An engine whose weights change between steps."""

    def __init__(self, served: Served, how: How) -> None:
        self.served = served
        self.core: EngineCore = served.instance.core(how)
        self.found: Answers = {}
        self.weights = InstanceWeights(served.instance.executor.new_weights, self.core, self.end_all)
        self.version = self.updates = 0
        if served.instance.executor.new_weights.digest:  # of an earlier test
            self.update(0, InFlight.KEEP)

    def end_all(self) -> None:
        for number in self.core.admission.requests_of(PEER):
            self.core.abort(PEER, [number])
            self.found[number].ended = FinishReason.ABORT, None

    def submit(self, submit: Submit) -> None:
        self.found[submit.request] = Answer()
        assert self.core.submit(PEER, submit) is None

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            step(self.core, self.found, lambda: None)

    def finish(self) -> None:
        while not self.core.is_empty:
            self.step()
        assert self.core.reports.report(0, 0).blocks_used == 0

    def update(self, version: int, in_flight: InFlight) -> None:
        self.updates += 1
        source = str(self.served.directories[version])
        update = WeightUpdate(WeightVersion(self.updates, "", source, "", f"u{self.updates}"), in_flight)
        self.weights.prepare(update, lambda: False)
        self.weights.switch(update, in_flight)
        self.version = version


def request(number: int, prompt: list[int], most: int = 24) -> Submit:
    params = SamplingParams(max_tokens=most, ignore_eos=True, logprobs=2, temperature=0.0)
    return Submit(number, f"r{number}", prompt, params, 0)


PROMPT = [7 * n % 380 + 5 for n in range(70)]


@pytest.mark.each_push
def test_requests_go_on_with_their_old_keys(served: Served) -> None:
    running = Running(served, How())
    running.submit(request(1, PROMPT))
    running.step(6)
    before = len(running.found[1].token_ids)
    assert 0 < before < 24
    running.update(1, InFlight.KEEP)
    running.submit(request(2, PROMPT))
    running.finish()
    old, new = served.alone(0, request(1, PROMPT)), served.alone(1, request(2, PROMPT))
    assert running.found[1].token_ids[:before] == old.token_ids[:before]
    assert len(running.found[1].token_ids) == 24
    assert running.found[1] not in (old, new)
    assert running.found[2] == new
    running.submit(request(3, PROMPT))
    running.finish()
    assert running.found[3] == new


def test_requests_are_computed_again_by_the_new_weights(served: Served) -> None:
    running = Running(served, How(budget=32))
    running.submit(request(1, PROMPT))
    running.step(8)
    begun = list(running.found[1].token_ids)
    assert 0 < len(begun) < 24
    running.submit(request(2, PROMPT[1:]))
    running.step()  # a part of its prompt
    running.update(1, InFlight.RECOMPUTE)
    running.finish()
    assert running.found[2] == served.alone(1, request(2, PROMPT[1:]))
    resumed = Submit(3, "r3", PROMPT, request(3, PROMPT).params, 0, output_ids=running.found[1].token_ids[:9])
    whole = served.fresh(1).answers([resumed], ALONE)[0][3]
    assert running.found[1].token_ids[: len(begun)] == begun
    assert running.found[1].token_ids == [*running.found[1].token_ids[:9], *whole.token_ids[9:]]
    assert running.found[1].logprobs[9:] == whole.logprobs


@pytest.mark.parametrize("budget", [24, 512])
def test_scores_are_of_the_version(budget: int, served: Served) -> None:
    """The ratio of a rollout's and a scored log-probability is exactly 1, version by version."""
    running = Running(served, How(budget=budget, ngrams=budget == 512))
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    for version in (0, 1, 2, 1):
        running.update(version, InFlight.RECOMPUTE)
        numbers = [100 * running.updates + n for n in range(4)]
        prompts = {number: PROMPT[: 20 + 13 * (number % 4)] for number in numbers}
        for number, prompt in prompts.items():
            sampled = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, temperature=0.8)
            running.submit(Submit(number, f"r{number}", prompt, sampled, number))
        running.finish()
        for number, prompt in prompts.items():
            text = prompt + running.found[number].token_ids
            running.submit(Submit(50 + number, f"s{number}", text, scoring, 0))
        running.finish()
        for number, prompt in prompts.items():
            scored = running.found[50 + number].prompt_logprobs
            assert scored is not None
            assert scored[len(prompt) :] == running.found[number].logprobs


def test_requests_end_where_that_is_asked_for(served: Served) -> None:
    running = Running(served, How())
    running.submit(request(1, PROMPT))
    running.step(5)
    running.update(1, InFlight.ABORT)
    assert running.found[1].ended == (FinishReason.ABORT, None)
    assert running.core.is_empty
    running.submit(request(2, PROMPT))
    running.finish()
    assert running.found[2] == served.alone(1, request(2, PROMPT))


def test_requests_cannot_end_on_the_old_weights_in_a_group(served: Served) -> None:
    running = Running(served, How())
    running.weights._in_groups = True
    update = WeightUpdate(WeightVersion(9, "", str(served.directories[1]), "", "u9"), InFlight.FINISH)
    with pytest.raises(WeightsRefused, match=r"\(finish\): all members switch"):
        running.weights.prepare(update, lambda: False)


def test_a_source_with_other_weights_than_the_version_has_is_refused(served: Served) -> None:
    running = Running(served, How())
    version = WeightVersion(9, "", str(served.directories[1]), "0" * 32, "u9")
    with pytest.raises(WeightsRefused, match="than version 9"):
        running.weights.prepare(WeightUpdate(version), lambda: False)
    running.weights.discard("u9")


@pytest.mark.parametrize("seed", range(4))
def test_no_block_of_an_older_version_is_hit(seed: int, served: Served) -> None:
    """Requests with common beginnings, over updates and resets: each has one version's answer.

    Those that an update meets are kept, computed again or ended; all that come behind it are of the new one.
    """
    chance = random.Random(seed)
    running = Running(served, How(budget=64, cache=640 if seed % 2 else 4096, ngrams=seed % 2 == 0))
    pure: dict[int, tuple[int, Submit]] = {}
    number = 0
    for _ in range(6):
        for _ in range(chance.randrange(1, 5)):
            number += 1
            prompt = [*PROMPT[: chance.choice([17, 33, 64, 70])], chance.randrange(5, 380)]
            wanted = request(number, prompt, chance.randrange(1, 12))
            pure[number] = running.version, wanted
            running.submit(wanted)
            running.step(chance.randrange(3))
        if chance.random() < 0.3:
            running.core.sharing.reset(PEER, 0)
        if chance.random() < 0.5:
            running.finish()
        in_flight = chance.choice([InFlight.KEEP, InFlight.RECOMPUTE, InFlight.ABORT])
        begun = {key for key, each in running.found.items() if each.token_ids and each.ended == (None, None)}
        inside = {request.key[1] for request in running.core.scheduler.queues.running}
        unfinished = {key for key, each in running.found.items() if each.ended == (None, None)}
        running.update(chance.randrange(VERSIONS), in_flight)
        for key in unfinished:
            keeps = in_flight is InFlight.KEEP and key in inside
            if key in begun or keeps or in_flight is InFlight.ABORT:
                pure.pop(key, None)
            elif key in pure:
                pure[key] = running.version, pure[key][1]
    running.finish()
    assert len(pure) > 3
    for key, (version, wanted) in pure.items():
        assert running.found[key] == served.alone(version, wanted), (key, version)


def test_names_of_blocks_follow_the_version(served: Served) -> None:
    """Blocks of the old version stay in files, so their names must not come again."""
    running, seen = Running(served, How()), set[bytes]()
    for version in (0, 1, 2):
        running.update(version, InFlight.ABORT)
        assert not running.core.pool.known
        running.submit(request(10 + version, PROMPT, 1))
        running.finish()
        named = set(running.core.pool.known)
        assert named
        assert seen.isdisjoint(named)
        assert running.core.reports.capacity.weights == served.instance.executor.new_weights.digest
        seen |= named


def test_names_of_versions_differ_whatever_the_salt() -> None:
    names: Callable[..., list[int]] = prefix_names
    tokens, seen = list(range(33)), set[int]()
    roots = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("b", "a"), ("", "ab"), ("b", ""), ("\u00ff", "")]
    for salt, weights in roots:
        found = names(tokens, 16, salt, weights)
        assert seen.isdisjoint(found)
        seen.update(found)
