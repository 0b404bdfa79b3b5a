"""Drafts by an EAGLE-3 head: torch's predictions, equal bits, and heads that do not fit."""

from __future__ import annotations

import json
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
from tests.engine.invariance.answers import settings
from tests.engine.speculation.eagle_models import RandomHead
from tests.engine.speculation.test_draft_model import MOST, Drafting
from tests.engine.speculation.test_prediction_layer import WAYS, check_bits, check_proposals
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


@pytest.mark.parametrize("way", WAYS)
def test_proposals_are_what_torch_predicts(served: Served, way: str) -> None:
    check_proposals(served.instance, served.head.predictions, WAYS[way])


def test_mixed_requests_have_the_bits_that_they_have_without_drafts(served: Served) -> None:
    check_bits(served.instance)


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
