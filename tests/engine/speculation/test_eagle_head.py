"""Drafts by an EAGLE-3 head: torch's predictions, equal bits, and heads that do not fit."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import SHIPPED_MODEL, EngineConfig, ModelConfig, SchedulerConfig
from engine.config.speculation import USUAL
from engine.executor.uni import UniExecutor
from engine.kernels.core import library
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.model.finding import MODELS_DIRECTORY
from engine.settings import adopt, resolve
from engine.speculation.draft_model import DraftModel
from tests.engine.invariance.answers import How, settings
from tests.engine.invariance.mixed import longest_of, requests
from tests.engine.oracle import knowing
from tests.engine.speculation.eagle_models import RandomHead
from tests.engine.speculation.test_draft_model import MOST, Drafting
from tests.engine.speculation.test_prediction_layer import greedy
from tests.engine.states.models import SHIPPED_FILES, SHIPPED_VOCAB
from tests.engine.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(library.load() is None, reason="no native kernels here")
VOCAB = SHIPPED_VOCAB
FORMS: dict[str, dict[str, Any]] = {
    "eagle": {"form": "eagle", "draft_vocab_size": 320},
    "speculators": {
        "form": "speculators",
        "own_embedding": True,
        "draft_vocab_size": 320,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 5],
    },
    "the model's output layer": {"form": "speculators", "own_output": False, "norm_output": True},
}


def with_head(config: EngineConfig, head: Path, most: int = MOST) -> EngineConfig:
    text = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": most})
    return msgspec.structs.replace(
        config, scheduler=msgspec.structs.replace(config.scheduler, speculative_config=text)
    )


class Served:
    """A model and a head, and an instance that drafts by it."""

    def __init__(self, directory: Path, served: Path, how: dict[str, Any]) -> None:
        self.head = RandomHead(directory, served, **how)
        info = read_model_info(served)
        executor = UniExecutor(with_head(settings(served, dtype="float32"), directory), info, 1)
        facts = executor.load(lambda _phase: None)
        executor.allocate(8, 2)
        self.executor = executor
        self.instance = Drafting(served, executor, 16, facts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served") / "model"
    made = make_tiny_model(place, "llama", layers=6, vocab_size=VOCAB, max_position_embeddings=2048)
    for name in SHIPPED_FILES:
        shutil.copy(MODELS_DIRECTORY / SHIPPED_MODEL / name, made)
    return made


@pytest.fixture(scope="module", params=FORMS)
def served(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("head") / "head", model, dict(FORMS[request.param]))


WAYS = {"together": How(ngrams=True, caching=False), "chunks": How(ngrams=True, budget=24, caching=False)}
WAYS["prefix hits"] = How(ngrams=True, seqs=2)


@pytest.mark.parametrize("way", WAYS)
def test_proposals_are_what_torch_predicts(served: Served, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of each request's context, up to rounding and a shared block's end.

    What is drafted then is what follows, in part, so that tokens are accepted and refused.
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
    served.instance.always = True
    plain, _ = served.instance.answers(submits, How())
    follows = knowing([[*each.prompt_ids, *plain[each.request].token_ids] for each in submits])
    monkeypatch.setattr(DraftModel, "propose", propose)
    found, counters = served.instance.answers(submits, WAYS[way])
    assert found == plain
    assert counters.drafted_tokens > sum(counters.taken_by_place) > 30
    right = [
        served.head.predictions(tokens, len(proposal)) == proposal
        for tokens, proposal in random.Random(0).sample(seen, min(40, len(seen)))
    ]
    assert len(right) > 20
    assert sum(right) >= len(right) - 2, right


def test_mixed_requests_have_the_bits_that_they_have_without_drafts(served: Served) -> None:
    submits = requests(7, count=48, vocab_size=VOCAB, longest=80, most=20)
    served.instance.always = False
    expected, _ = served.instance.answers(submits, How())
    scarce = longest_of(submits) // 16 * 16 + 64
    for how in (How(ngrams=True), How(ngrams=True, budget=32, cache=scarce)):
        found, counters = served.instance.answers(submits, how)
        assert found == expected
        assert counters.drafted_tokens > 0
    assert counters.preemptions > 0


def refused(model: Path, head: Path, **device: Any) -> str:
    config = with_head(EngineConfig(model=ModelConfig(model=str(model))), head)
    config = msgspec.structs.replace(config, device=msgspec.structs.replace(config.device, **device))
    with pytest.raises(CheckpointError) as caught:
        resolve(config)
    return str(caught.value)


def test_heads_that_do_not_fit_are_refused_at_the_start_with_both_sides(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(
        tmp_path / "other", "llama", layers=6, vocab_size=VOCAB, hidden_size=80, num_attention_heads=5
    )
    fewer = make_tiny_model(tmp_path / "fewer", "llama", layers=6, vocab_size=VOCAB - 8)
    head = RandomHead(tmp_path / "head", model, "eagle", draft_vocab_size=320).directory
    assert f"{head} reads rows of 64, and {other} has rows of 80" in refused(other, head)
    assert f"{head} is for {VOCAB} tokens, and {fewer} has {VOCAB - 8}" in refused(fewer, head)
    assert (
        f"reads inner rows of layers 2, 3, 3, and -pp 2 has some in other stages than the last one of {model}"
        in (refused(model, head, pipeline_parallel_size=2))
    )
    deep = RandomHead(tmp_path / "deep", model, "eagle", eagle_aux_hidden_state_layer_ids=[1, 2, 3]).directory
    config = json.loads((deep / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}
    (deep / "config.json").write_text(json.dumps(config))
    assert f"{deep} reads the input of layer 6, and {model} has layers 0 to 5" in refused(model, deep)


def test_tensors_that_are_not_those_of_the_configuration_are_refused(model: Path, tmp_path: Path) -> None:
    head = RandomHead(tmp_path / "head", model, "speculators", draft_vocab_size=320)
    written = json.loads((head.directory / "config.json").read_text())

    def without(name: str) -> None:
        tensors = {key: each for key, each in head.tensors.items() if key != name}
        head.store(tensors)

    without("d2t")
    assert f"{head.directory} proposes 320 tokens of the {VOCAB} of {model}, and has no d2t" in (
        refused(model, head.directory)
    )
    without("fc.weight")
    assert f"{head.directory} has no fc.weight" in refused(model, head.directory)
    head.store(head.tensors)
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    made_for_3 = written | {"speculators_config": {"proposal_methods": methods}}
    (head.directory / "config.json").write_text(json.dumps(made_for_3))
    assert f"num_speculative_tokens is {MOST}, and {head.directory} was made for 3" in (
        refused(model, head.directory)
    )
    unset = EngineConfig(
        model=ModelConfig(model=str(model)),
        scheduler=SchedulerConfig(
            speculative_config=json.dumps({"method": "eagle3", "model": str(head.directory)})
        ),
    )
    _, settled = resolve(unset)
    adopted = adopt(unset, settled).scheduler.speculative
    assert adopted is not None
    assert adopted.most == 3, "as many as it was made for"
    assert unset.scheduler.speculative is not None
    assert unset.scheduler.speculative.most == USUAL
    (head.directory / "config.json").write_text(json.dumps(written | {"speculators_model_type": "dflash"}))
    assert "describes 'dflash'" in refused(model, head.directory)
