"""Lines that end together, or that no instance takes: what they hold meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from engine.messages import Delta, FinishReason
from engine.sampling import SamplingParams
from router.api.answering import Answering
from router.api.generating import Generating
from router.api.understanding import Understanding
from router.batches.batch_mesh import BatchMesh
from router.batches.line_runner import LineRunner
from router.batches.line_window import LineWindow
from router.batches.lines import BatchLine, LineAnswer
from router.batches.routes import line_handlers
from router.config import HttpConfig
from router.http.quotas import Quotas
from router.mesh import MeshError, Prompt, ServedModel
from router.metrics.metrics import Metrics
from router.pooled.routes import pooled_handlers
from router.text.text_models import TextModels
from router.text.tokens import Tokenizer
from tests.router.conftest import ids_of
from tests.router.fake_mesh import Facts, FakeGeneration, FakeMesh, Script, saying

TEXT = " Hello world! Hello"
LINES = 40
COMPLETIONS = "/v1/completions"


def runner_on(mesh: FakeMesh, per_instance: int) -> LineRunner:
    """A runner of lines as ``lockstep batch`` has it."""
    config, quotas, metrics = HttpConfig(), Quotas([]), Metrics(mesh)
    models = TextModels(mesh, config)
    answering = Answering(mesh, config, metrics, quotas)
    generating = Generating(config, Understanding(models, config), answering, quotas)
    handlers = line_handlers(generating, pooled_handlers(mesh, config, quotas, models, metrics.pooling))
    return LineRunner(handlers, mesh, metrics, Counter(), per_instance)


def line(number: int, **body: object) -> BatchLine:
    whole = {"model": "tiny", "prompt": "Hello", "max_tokens": 200} | body
    return BatchLine(str(number), COMPLETIONS, msgspec.Raw(json.dumps(whole).encode()))


def choice_of(answer: LineAnswer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.text)["response"]["body"]["choices"][0]
    return found


class GatedGeneration(FakeGeneration):
    gate: asyncio.Event

    async def __aiter__(self) -> AsyncIterator[Delta]:
        await self.gate.wait()
        async for delta in super().__aiter__():
            yield delta


class StepMesh(FakeMesh):
    """A mesh that computes all its requests in the same steps, once all are there."""

    def __init__(self, served: ServedModel, script: Script) -> None:
        super().__init__(served, script, Facts(instances={"ready": 1}))
        self.gate = asyncio.Event()

    def generate(self, prompt: Prompt) -> FakeGeneration:
        generation = GatedGeneration(self, prompt, self.script(prompt))
        generation.gate = self.gate
        self.generations.append(generation)
        if len(self.generations) == LINES:
            self.gate.set()
        return generation


@pytest.mark.parametrize("stop", [None, "world"])
def test_lines_that_end_in_one_step_are_answered_one_by_one(
    served: ServedModel, tokenizer: Tokenizer, stop: str | None
) -> None:
    mesh = StepMesh(served, saying(ids_of(tokenizer, TEXT)))
    done = most = 0

    async def answer(runner: LineRunner, number: int) -> LineAnswer:
        nonlocal done
        found = await runner.answer("batch_a", 0, number, line(number, stop=stop))
        done += 1
        return found

    async def run() -> list[LineAnswer]:
        nonlocal most
        runner = runner_on(mesh, LINES)
        tasks = [asyncio.create_task(answer(runner, number)) for number in range(LINES)]
        while not all(task.done() for task in tasks):
            before = done
            await asyncio.sleep(0)
            most = max(most, done - before)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(asyncio.wait_for(run(), 20))
    expected = (TEXT, "length") if stop is None else (" Hello ", "stop")
    for each in map(choice_of, answers):
        assert (each["text"], each["finish_reason"]) == expected
    assert most <= 2, "other requests are served in between"
    assert not mesh.num_open


async def tokens_of(mesh: BatchMesh, number: int) -> list[int]:
    generation = mesh.generate(Prompt(str(number), [1], SamplingParams(max_tokens=2), 0, rank=number))
    found = [id async for delta in generation for id in delta.token_ids]
    generation.close()
    return found


def test_a_line_that_waits_for_its_turn_holds_no_place(served: ServedModel) -> None:
    mesh = FakeMesh(served, saying([5, 6], FinishReason.STOP), Facts(instances={"ready": 1}))
    window = LineWindow(mesh, 1)

    async def run() -> None:
        async with window._turn:  # another line's answer is made
            tasks = [
                asyncio.create_task(tokens_of(BatchMesh(mesh, window, number, Counter()), number))
                for number in range(2)
            ]
            for _ in range(50):
                await asyncio.sleep(0)
            assert not any(task.done() for task in tasks)
            assert len(mesh.prompts) == 2, "the second one runs while the first one waits"
            assert (window.count, mesh.num_open) == (0, 0)
        assert await asyncio.gather(*tasks) == [[5, 6], [5, 6]]
        assert window.count == 0

    asyncio.run(asyncio.wait_for(run(), 5))


class EndingMesh(FakeMesh):
    """A mesh whose instances end of each request, and take long to come back."""

    num_tokens = 0
    """Tokens that a try gives before."""

    def generate(self, prompt: Prompt) -> FakeGeneration:
        generation = EndingGeneration(self, prompt, self.script(prompt)[: self.num_tokens])
        self.generations.append(generation)
        return generation


class EndingGeneration(FakeGeneration):
    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._deltas:
            yield delta
        error = MeshError(503, "ServiceUnavailableError", "no instance is ready")
        error.num_lost = 3
        raise error


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_line_that_ends_instances_which_come_back_slowly_has_an_error(
    served: ServedModel,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    samples: int,
) -> None:
    for module in ("batch_mesh", "line_runner"):
        monkeypatch.setattr(f"router.batches.{module}.pauses", lambda: itertools.repeat(0.0))
    mesh = EndingMesh(served, saying(ids_of(tokenizer, TEXT)), Facts(instances={"ready": 1}))
    mesh.num_tokens = num_tokens
    runner = runner_on(mesh, 4)
    answering = runner.answer("batch_a", 0, 0, line(0, n=samples))
    answer = asyncio.run(asyncio.wait_for(answering, 20))
    assert answer.is_error
    assert b"9 instances ended while they computed the request" in answer.text
    assert len(mesh.generations) == 3 * samples, "three instances at each try"


class LackingMesh(FakeMesh):
    """A mesh whose instance 0 is not there."""

    num_refused = 0

    def generate(self, prompt: Prompt) -> FakeGeneration:
        if prompt.rank == 0:
            self.num_refused += 1
            raise MeshError(503, "ServiceUnavailableError", "instance 0 is not there now")
        return super().generate(prompt)


def test_a_line_that_no_instance_takes_holds_no_place_between_its_tries(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.batch_mesh.FIRST_PAUSE", 60.0)
    mesh = LackingMesh(served, saying([5, 6], FinishReason.STOP), Facts(instances={"ready": 1}))
    window, events = LineWindow(mesh, 1), Counter[str]()

    async def run() -> None:
        lacking = asyncio.create_task(tokens_of(BatchMesh(mesh, window, 0, events), 0))
        assert await tokens_of(BatchMesh(mesh, window, 1, events), 1) == [5, 6]
        assert (mesh.num_refused, events["line_tried_again"], window.count) == (1, 1, 0)
        lacking.cancel()
        await asyncio.gather(lacking, return_exceptions=True)
        assert window.count == 0

    asyncio.run(asyncio.wait_for(run(), 5))
