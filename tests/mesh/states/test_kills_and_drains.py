"""Meshes that serve models with recurrent states keep their bits, whatever happens to instances.

Instances are killed, drained and started again, and their layouts differ. Answers are compared with those of one
engine in this process, in bfloat16, with log-probabilities.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from engine.messages import Submit
from engine.sampling import SamplingParams
from tests.engine.invariance.answers import How, load
from tests.engine.states.agent import grid_of
from tests.engine.states.models import make_servable_model
from tests.mesh.faults.test_transfers import of, streams
from tests.mesh.harness import Command, Ports, serve, wait_until
from tests.nightly import NIGHTLY

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

FLAGS = [
    *("--dtype", "bfloat16", "--num-gpu-blocks-override", "1200", "--max-num-seqs", "16"),
    *("--batch-invariant", "--served-model-name", SHIPPED_MODEL),
]
FAMILIES = [
    "qwen3_next",
    *(pytest.param(each, marks=pytest.mark.nightly) for each in ("nemotron_h", "lfm2_moe")),
]
LENGTH, TOKENS = (300, 400) if NIGHTLY else (200, 250)
"""Tokens of a prompt, and of an answer that outlasts what happens to its instance."""
at_night = pytest.mark.nightly

Answers = list[tuple[list[int], list[str]]]
"""Token ids and log-probabilities."""


class Model:
    """A tiny model, and what an engine alone answers."""

    def __init__(self, directory: Path, family: str) -> None:
        self.directory = make_servable_model(directory, family)
        torch.set_num_threads(1)
        self._instance = load(directory, batch_invariant=True)
        self.grid = grid_of(self._instance)
        self.answers = cache(self._answers)

    def _answers(self, count: int) -> Answers:
        """Answers to prompts as ``streams`` asks for them, with the sampling defaults of the model."""
        params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
        submits = [
            Submit(index, str(index), prompt, params, 5) for index, prompt in enumerate(prompts(count))
        ]
        found = self._instance.answers(submits, How(states=64))[0]
        return [(each.token_ids, [line[1] for line in each.logprobs]) for each in found.values()]

    def serve(self, log: Path, ports: Ports, *flags: str) -> Command:
        return serve(log, str(self.directory), *ports.head(), *FLAGS, *flags)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp(request.param), request.param)


def prompts(count: int) -> list[list[int]]:
    return [[4 + (90 * each + 7 * index) % 4000 for index in range(LENGTH)] for each in range(count)]


def ask(ports: Ports, count: int, act: Callable[[], object] | None = None) -> Answers:
    """Answers of streams; with ``act``, those of instance 1, to which it happens."""
    return asyncio.run(streams(ports, prompts(count), act, tokens=TOKENS))


def moved(command: Command) -> tuple[int, int, int]:
    """Requests that went on elsewhere, with their computed and cached tokens."""
    wait_until(lambda: "are back after" in command.log, 20, "all have moved")
    found = re.search(
        r"(\d+) requests of .* back .* (\d+) tokens computed again, (\d+) were cached", command.log
    )
    assert found is not None, command.log
    number, computed, cached = map(int, found.groups())
    return number, computed, cached


def end(command: Command) -> None:
    assert "Traceback" not in command.log
    assert command.stop() == 0


@pytest.mark.parametrize("flags", [("-ep",), pytest.param(("-ep", "-pp", "2"), marks=at_night)], ids=" ".join)
def test_streams_of_a_killed_instance_go_on_bit_for_bit(
    flags: tuple[str, ...], model: Model, tmp_path: Path
) -> None:
    """Experts are spread over both instances; n-grams are drafted."""
    ports = Ports()
    drafts = ("--speculative-config", '{"method": "ngram", "adaptive": false}')
    with model.serve(tmp_path / "log", ports, "-dp", "2", *flags, *drafts) as command:
        command.wait_for("2 instances ready")
        assert ask(ports, 4, command.child("Engine_1").kill) == model.answers(4)
        assert moved(command)[0] > 0
        assert command.log.count("recovered in epoch") == 1
        assert "Traceback" not in command.log
        command.stop()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags", [("-pp", "2"), pytest.param(("-tp", "2"), marks=at_night), pytest.param(("-pp", "2", "-tp", "2"), marks=at_night)], ids=" ".join
)  # fmt: skip
def test_stages_and_ranks_change_no_bit(flags: tuple[str, ...], model: Model, tmp_path: Path) -> None:
    ports = Ports()
    with model.serve(tmp_path / "log", ports, "-dp", "1", *flags) as command:
        command.wait_for("1 instance ready")
        assert ask(ports, 4) == model.answers(4)
        end(command)


@at_night
@pytest.mark.parametrize("flags", [(), ("-pp", "2"), ("-tp", "2")], ids=" ".join)
def test_a_drained_instances_requests_move_with_their_states(
    flags: tuple[str, ...], model: Model, tmp_path: Path
) -> None:
    ports = Ports()
    with model.serve(tmp_path / "log", ports, "-dp", "2", "--drain-timeout", "0", *flags) as command:
        command.wait_for("2 instances ready")
        assert ask(ports, 4, command.child("Engine_1").terminate) == model.answers(4)
        number, computed, cached = moved(command)
        assert cached >= number * (LENGTH - model.grid)
        assert computed <= number * model.grid
        wait_until(lambda: of(ports, "vllm:kv_cache_usage_perc", 0) == 0, 10, "nothing is held")
        end(command)


@at_night
def test_survivors_go_on_from_the_states_of_a_killed_instance(model: Model, tmp_path: Path) -> None:
    ports = Ports()
    flags = ("--enable-kv-inheritance", "--restart", "--no-enable-expert-parallel")
    with model.serve(tmp_path / "log", ports, "-dp", "2", *flags) as command:
        command.wait_for("2 instances ready")
        assert ask(ports, 4, command.child("Engine_1").kill) == model.answers(4)
        number, computed, cached = moved(command)
        assert cached >= number * (LENGTH - model.grid)
        assert computed <= number * 2 * model.grid
        assert "Traceback" not in command.log
        command.stop()


def test_a_mesh_that_starts_again_goes_on_from_states_in_files(model: Model, tmp_path: Path) -> None:
    ports = Ports()
    flags = ("-dp", "1", "--kv-cache-dir", str(tmp_path / "kv"))
    with model.serve(tmp_path / "log", ports, *flags) as command:
        command.wait_for("1 instance ready")
        assert ask(ports, 2) == model.answers(2)
        end(command)
    with model.serve(tmp_path / "again", ports, *flags) as command:
        command.wait_for("1 instance ready")
        assert ask(ports, 2) == model.answers(2)
        found = of(ports, "vllm:kv_offload_tiering_block_hits_total", 0, tier="fs")
        assert found >= 2 * (LENGTH - model.grid) // 16
        end(command)
