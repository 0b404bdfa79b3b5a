"""Drafts by a checkpoint's prediction layer: torch's predictions, and equal bits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from engine.config import EngineConfig, ModelConfig
from engine.executor.uni import UniExecutor
from engine.kernels.core import library
from engine.messages import Submit
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.sampling import SamplingParams
from engine.settings import resolve
from engine.speculation.draft_model import DraftModel
from engine.speculation.prediction_layer import STAND_IN
from tests.engine.invariance.answers import How, settings
from tests.engine.invariance.mixed import longest_of, requests
from tests.engine.oracle import knowing
from tests.engine.speculation.prediction_models import PredictingModel
from tests.engine.speculation.test_draft_model import MOST, Drafting
from tests.engine.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(library.load() is None, reason="no native kernels here")
FAMILIES = [
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    pytest.param("glm4_moe_lite", marks=pytest.mark.nightly),
    "qwen3_next",
]
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": MOST})


def with_mtp(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(
        config, scheduler=msgspec.structs.replace(config.scheduler, speculative_config=MTP)
    )


class Served:
    """A checkpoint with a prediction layer, and an instance that drafts by it."""

    def __init__(self, directory: Path, family: str) -> None:
        self.model = PredictingModel(directory, family)
        info = read_model_info(directory)
        executor = UniExecutor(with_mtp(settings(directory, dtype="float32")), info, 1)
        facts = executor.load(lambda _phase: None)
        executor.allocate(8, 2)
        self.instance = Drafting(directory, executor, 16, facts)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("predicting") / request.param, request.param)


def greedy(count: int) -> list[Submit]:
    chance = random.Random(1)
    shared = [chance.randrange(4, 500) for _ in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    texts = [shared + [chance.randrange(4, 500) for _ in range(chance.randrange(30))] for _ in range(count)]
    return [
        Submit(request=i, request_id=f"g{i}", prompt_ids=each, params=params, seed=i)
        for i, each in enumerate(texts)
    ]


WAYS = {"together": How(ngrams=True, caching=False), "chunks": How(ngrams=True, budget=24, caching=False)}
WAYS["prefix hits"] = How(ngrams=True, seqs=2)


def check_proposals(instance: Drafting, predictions: Callable[[list[int], int], list[int]], how: How) -> None:
    """Assert that proposals are what torch predicts.

    Keys are of each request's context, up to rounding and a shared block's end. What is drafted then is what
    follows, in part, so that tokens are accepted and refused.
    """
    seen: list[tuple[list[int], list[int]]] = []
    own = DraftModel.propose

    def propose(self: DraftModel, step: Any, texts: Any, tables: Any, result: Any) -> Any:
        found = own(self, step, texts, tables, result)
        known = {}
        for row, proposal in found.proposals.items():
            further = result.further.get(row)
            end = step.starts[row] + 1 if row in step.drafts else step.ends[row]
            end += 1 + (0 if further is None else len(further.tokens))
            tokens = texts[step.slots[row]][:end].tolist()
            seen.append((tokens, proposal))
            following = follows(tokens, len(proposal))
            known[row] = following if chance.random() < 0.5 else [*following[:1], *proposal[1:]]
        return msgspec.structs.replace(found, proposals=known)

    submits, chance = greedy(4), random.Random(2)
    instance.always = True
    plain, _ = instance.answers(submits, How())
    follows = knowing([[*each.prompt_ids, *plain[each.request].token_ids] for each in submits])
    with mock.patch.object(DraftModel, "propose", propose):
        found, counters = instance.answers(submits, how)
    assert found == plain
    assert counters.drafted_tokens > sum(counters.taken_by_place) > 30
    right = [
        predictions(tokens, len(proposal)) == proposal
        for tokens, proposal in random.Random(0).sample(seen, min(40, len(seen)))
    ]
    assert len(right) > 20
    assert sum(right) >= len(right) - 2, right


def check_bits(instance: Drafting) -> None:
    """Assert that mixed requests have the bits that they have without drafts."""
    submits = requests(7, count=48, vocab_size=instance.info.vocab_size, longest=80, most=20)
    instance.always = False
    expected, _ = instance.answers(submits, How())
    scarce = longest_of(submits) // 16 * 16 + 64
    for how in (How(ngrams=True), How(ngrams=True, budget=32, cache=scarce)):
        found, counters = instance.answers(submits, how)
        assert found == expected
        assert counters.drafted_tokens > 0
    assert counters.preemptions > 0


@pytest.mark.parametrize("way", WAYS)
def test_proposals_are_what_torch_predicts(served: Served, way: str) -> None:
    check_proposals(served.instance, served.model.predictions, WAYS[way])


def test_mixed_requests_have_the_bits_that_they_have_without_drafts(served: Served) -> None:
    check_bits(served.instance)


def test_embedding_and_output_layer_are_in_memory_once(served: Served) -> None:
    drafts: Any = served.instance.executor._drafts
    if drafts._info.model_type == "deepseek_v3":  # its files have copies
        assert len(drafts._model.module.model.embed_tokens.weight) == served.instance.info.vocab_size
        return
    assert len(drafts._model.module.model.embed_tokens.weight) == STAND_IN
    assert drafts._program.laid_out.weight_bytes < served.instance.executor._program.laid_out.weight_bytes / 2
    own, whole = drafts._program.ends.output, served.instance.executor._program.laid_out.packed.output
    assert own.head is whole.head


def test_a_checkpoint_without_such_a_layer_is_refused_at_the_start(tmp_path: Path) -> None:
    llama = make_tiny_model(tmp_path / "llama", "llama")
    with pytest.raises(CheckpointError, match=f"glm4_moe_lite, qwen3_next, and {llama} is llama"):
        resolve(with_mtp(EngineConfig(model=ModelConfig(model=str(llama)))))
    without = make_tiny_model(tmp_path / "without", "deepseek_v3")
    executor = UniExecutor(with_mtp(settings(without, dtype="float32")), read_model_info(without), 1)
    with pytest.raises(CheckpointError, match=r"has no prediction layer: model\.layers\.3\.e"):
        executor.load(lambda _phase: None)
