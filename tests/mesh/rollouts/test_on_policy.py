"""Rollouts over updates and deaths: tokens scored by their weights have a ratio of 1.0."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from lockstep import LLM
from tests.engine.weight_versions.made import trained
from tests.mesh.clients.test_clients import assert_idle
from tests.mesh.faults.load import session
from tests.mesh.harness import wait_until
from tests.mesh.running.test_pauses import PausedMesh
from tests.nightly import NIGHTLY

pytestmark = pytest.mark.mesh

NUM_ROLLOUTS, NUM_UPDATES, NUM_KILLS = (1000, 20, 2) if NIGHTLY else (120, 4, 1)
AT_ONCE = 16
FEWEST_OVER_A_CHANGE = NUM_UPDATES
"""Rollouts that must have tokens of several weights; else the test shows nothing."""


class Rollout(msgspec.Struct):
    """A sample with its log-probabilities, and the weights of its tokens."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, str]]
    """First tokens, and the names of their weights."""

    def parts(self) -> Iterator[tuple[str, range]]:
        """Names of weights, and the tokens that they made."""
        ends = [begin for begin, _ in self.spans[1:]] + [len(self.token_ids)]
        for (begin, name), end in zip(self.spans, ends, strict=True):
            yield name, range(begin, end)


def body_of(number: int) -> dict[str, Any]:
    """A request of token ids; every third one streams."""
    chance = random.Random(number)
    sampling = {"max_tokens": chance.randint(40, 240), "temperature": 1.0, "seed": number, "logprobs": 0}
    prompt = chance.choices(range(5, 4000), k=chance.randint(8, 60))
    return {
        "token_ids": prompt,
        "sampling_params": sampling | {"ignore_eos": True},
        "stream": number % 3 == 0,
    }


def read(body: dict[str, Any], answers: list[dict[str, Any]]) -> Rollout:
    """A rollout from an answer, or from the chunks of a stream."""
    found = Rollout(body["token_ids"], [], [], [])
    for choice in (choice for answer in answers for choice in answer["choices"]):
        found.token_ids += choice["token_ids"]
        found.logprobs += [each["logprob"] for each in choice["logprobs"]["content"]]
        for span in choice.get("weight_versions", []):
            found.spans.append((span["first_token"], span["weight_version"]))
    assert len(found.token_ids) == body["sampling_params"]["max_tokens"]
    assert found.spans[0][0] == 0
    return found


class Trainer:
    """Updates of a mesh while it serves, some with a death in their midst."""

    def __init__(self, mesh: PausedMesh, directories: list[Path]) -> None:
        self._mesh = mesh
        self._directories = itertools.cycle(directories)
        self.sources = {"default": MODELS_DIRECTORY / SHIPPED_MODEL}
        """Directories by the names of weights."""

    def update(self, number: int, *, kills: bool) -> None:
        directory, label = next(self._directories), f"step-{number}"
        self.sources[label] = directory
        killer = threading.Timer(0.02, self._mesh.engine(1).kill) if kills else None
        if killer is not None:
            killer.start()
        fields = {"model_path": str(directory), "weight_version": label, "in_flight": "recompute"}
        status, answer = self._mesh.call("/update_weights_from_disk", fields)
        assert status == 200, answer
        if killer is not None:
            killer.join()
            wait_until(lambda: self._mesh.ready() == [0], 30, "the dead one is out")
            self._mesh.make_whole()


async def roll_out(mesh: PausedMesh, trainer: Trainer) -> list[Rollout]:
    """At least as many rollouts as wanted, until all updates between them are done."""
    found: list[Rollout] = []
    numbers = itertools.count()
    kill_at = {NUM_UPDATES * (index + 1) // (NUM_KILLS + 1) for index in range(NUM_KILLS)}
    is_trained, one_more = False, asyncio.Event()

    async def client(session: aiohttp.ClientSession) -> None:
        while len(found) < NUM_ROLLOUTS or not is_trained:
            body = body_of(next(numbers))
            async with session.post(f"{mesh.url}/inference/v1/generate", json=body) as answer:
                text = await answer.text()
                assert answer.status == 200, text
            lines = text.splitlines() if body["stream"] else ["data: " + text]
            parts = [msgspec.json.decode(line[6:]) for line in lines if line.startswith("data: {")]
            found.append(read(body, parts))
            one_more.set()

    async def train() -> None:
        nonlocal is_trained
        for number in range(1, NUM_UPDATES + 1):
            while len(found) < NUM_ROLLOUTS * number // (NUM_UPDATES + 2):
                one_more.clear()
                await one_more.wait()
            await asyncio.to_thread(trainer.update, number, kills=number in kill_at)
        is_trained = True

    async with session() as http, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(client(http))
        group.create_task(train())
    return found


def scores(directory: Path, rollouts: list[Rollout]) -> list[list[float]]:
    """Log-probabilities of all tokens of rollouts by the weights of a directory."""
    flags: dict[str, Any] = {"num_gpu_blocks_override": 600, "max_num_seqs": 32, "dtype": "float32"}
    with LLM(str(directory), data_parallel_size=1, enable_expert_parallel=False, **flags) as llm:
        return llm.score_tokens([each.prompt for each in rollouts], [each.token_ids for each in rollouts])


def test_the_ratio_is_one_for_every_token(tmp_path: Path) -> None:
    model = MODELS_DIRECTORY / SHIPPED_MODEL
    directories = [trained(model, tmp_path / f"new{seed}", seed=seed) for seed in (1, 2)]
    with contextlib.ExitStack() as stack:
        mesh = PausedMesh(tmp_path, stack, "--no-enable-expert-parallel")
        trainer = Trainer(mesh, directories)
        began = time.monotonic()
        rollouts = asyncio.run(roll_out(mesh, trainer))
        took = time.monotonic() - began
        assert_idle(mesh)
        assert "goes on in another numerics class" not in mesh.log, "an update is one line for an instance"
        assert mesh.command.stop() == 0
        assert not mesh.tracebacks()
    assert len(rollouts) >= NUM_ROLLOUTS
    num_changed = sum(len(each.spans) > 1 for each in rollouts)
    assert num_changed >= FEWEST_OVER_A_CHANGE, f"{num_changed} of {len(rollouts)} in {took:.0f} s"
    assert {name for each in rollouts for name, _ in each.parts()} >= {f"step-{NUM_UPDATES}", "default"}
    num_checked = 0
    for directory in {*trainer.sources.values()}:
        own = {name for name, source in trainer.sources.items() if source == directory}
        wanted = [each for each in rollouts if any(name in own for name, _ in each.parts())]
        for rollout, scored in zip(wanted, scores(directory, wanted), strict=True):
            for name, tokens in rollout.parts():
                if name in own:
                    at_once = rollout.logprobs[tokens.start : tokens.stop]
                    assert scored[tokens.start : tokens.stop] == at_once, (name, rollout.spans)
                    num_checked += len(tokens)
    assert num_checked == sum(len(each.token_ids) for each in rollouts), "no token was left out"
