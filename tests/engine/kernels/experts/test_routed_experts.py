"""Experts in answers are those that transformers chooses, however they are computed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from engine.kernels.core import library
from engine.messages import NO_EXPERT, RoutedExperts, Submit
from engine.sampling import SamplingParams
from tests.engine.invariance.answers import Answer, How, Instance, load
from tests.engine.invariance.spread import Members, in_shared_memory
from tests.engine.native_families import MIXTURES, SOME_MIXTURES, make_family
from tests.engine.tiny_models import VOCAB
from tests.nightly import NIGHTLY

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

Choices = npt.NDArray[np.uint16]
NUM_REQUESTS = 6


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=MIXTURES if NIGHTLY else SOME_MIXTURES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("r") / request.param, request.param)


@pytest.fixture(scope="module")
def instance(directory: Path) -> Instance:
    return load(directory, dtype="float32")


class Chosen:
    """A model of transformers, whose experts' modules are asked which experts they get."""

    def __init__(self, directory: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self._found: dict[int, torch.Tensor] = {}
        self._layers = self._model.model.layers
        for number, layer in enumerate(self._layers):
            for name, module in layer.named_modules():
                if name.rpartition(".")[2] == "experts":
                    module.register_forward_pre_hook(self._hook(number))

    def _hook(self, number: int) -> Any:
        def look(_module: object, arguments: tuple[torch.Tensor, ...]) -> None:
            self._found[number] = next(each for each in arguments[1:] if not each.is_floating_point())

        return look

    def of(self, token_ids: Sequence[int]) -> Choices:
        """[tokens, layers, experts of a token], those of a token rising."""
        self._found.clear()
        with torch.inference_mode():
            self._model(torch.tensor([token_ids]), use_cache=False)
        top_k = next(iter(self._found.values())).shape[-1]
        made = np.full((len(token_ids), len(self._layers), top_k), NO_EXPERT, dtype=np.uint16)
        for number, ids in self._found.items():
            made[:, number] = ids.reshape(-1, top_k).sort(dim=-1).values.numpy()
        return made


@pytest.fixture(scope="module")
def chosen(directory: Path) -> Chosen:
    return Chosen(directory)


def submits(*, routed: bool = True, beside: bool = False) -> list[Submit]:
    """Requests of which some begin alike; ``beside``: every second one wants no experts."""
    chance, made = random.Random(3), []
    common = chance.choices(range(VOCAB), k=40)
    for number in range(NUM_REQUESTS):
        prompt = [*common[: 40 if number % 2 else 0], *chance.choices(range(VOCAB), k=chance.randint(1, 30))]
        params = SamplingParams(temperature=0.0 if number % 3 else 1.0, max_tokens=12, ignore_eos=True)
        wants = routed and not (beside and number % 2)
        made.append(Submit(number, str(number), prompt, params, seed=number, routed_experts=wants))
    return made


def whole(parts: Sequence[RoutedExperts]) -> Choices:
    """All parts of a request's experts, which follow each other."""
    end = parts[0].first
    for part in parts:
        assert part.first == end
        end = part.end
    numbers = np.frombuffer(b"".join(part.ids for part in parts), dtype=np.uint16)
    return np.sort(numbers.reshape(-1, parts[0].num_layers, parts[0].top_k), axis=-1)


def check(chosen: Chosen, wanted: Sequence[Submit], answers: dict[int, Answer]) -> None:
    for submit in wanted:
        answer = answers[submit.request]
        if not submit.routed_experts:
            assert not answer.routed
            continue
        ids = [*submit.prompt_ids, *answer.token_ids]
        first = answer.routed[0].first
        assert (
            first == len(submit.prompt_ids) + len(submit.output_ids) - 1 if submit.output_ids else first == 0
        )
        found, expected = whole(answer.routed), chosen.of(ids[:-1])[first:]
        assert found.tolist() == expected.tolist()


def test_they_are_those_of_transformers(chosen: Chosen, instance: Instance) -> None:
    wanted = submits()
    plain, _ = instance.answers(submits(routed=False), How())
    found, _ = instance.answers(wanted, How())
    assert [each.text for each in found.values()] == [each.text for each in plain.values()]
    check(chosen, wanted, found)


def test_chunks_preemption_drafts_and_hits_change_nothing(chosen: Chosen, instance: Instance) -> None:
    """A prompt whose experts are wanted is computed whole; others find what it leaves."""
    wanted = submits(beside=True)
    found, counters = instance.answers(wanted, How(budget=24, cache=160, ngrams=True))
    check(chosen, wanted, found)
    assert counters.preemptions > 0
    _, counters = instance.answers(submits(routed=False), How(budget=24))
    assert counters.prefix_cache_hits > 0, "the prompts have nothing in common"
    every, counters = instance.answers(submits(), How(budget=24))
    assert counters.prefix_cache_hits == 0
    drafted, counters = instance.answers(submits(), How(budget=64, drafts=every))
    assert counters.drafted_tokens > sum(counters.taken_by_place) > 0
    check(chosen, submits(), drafted)


def test_a_resumed_request_gets_what_is_new(chosen: Chosen, instance: Instance) -> None:
    wanted = submits()
    found, _ = instance.answers(wanted, How())
    later = [msgspec.structs.replace(each, output_ids=found[each.request].token_ids[:5]) for each in wanted]
    again, _ = instance.answers(later, How(budget=24))
    assert [each.text for each in again.values()] == [each.text for each in found.values()]
    check(chosen, later, again)


def test_spread_experts_have_one_number_on_all_instances(directory: Path, chosen: Chosen) -> None:
    wanted = submits(beside=True)
    members = Members(directory, 2, in_shared_memory, dtype="float32")
    try:
        check(chosen, wanted, members.answers(wanted))
        assert all(each._program.exchange.joined is not None for each in members.executors)
    finally:
        members.close()
