"""New weights bring their prediction layer along; a head goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.executor.uni import UniExecutor
from engine.kernels.core import library
from engine.model.checkpoint import read_model_info
from engine.speculation.draft_model import DraftModel
from engine.weight_versions.contract import WeightsRefused
from tests.engine.invariance.answers import Answers, How, settings
from tests.engine.speculation.eagle_models import RandomHead
from tests.engine.speculation.prediction_models import PredictingModel
from tests.engine.speculation.test_draft_model import Drafting
from tests.engine.speculation.test_eagle_head import with_head
from tests.engine.speculation.test_prediction_layer import greedy, with_mtp
from tests.engine.weight_versions.made import trained

pytestmark = pytest.mark.skipif(library.load() is None, reason="no native kernels here")

SHARED = "eagle3 with the model's output layer"
WithDrafts = Callable[[EngineConfig], EngineConfig]


def loaded(directory: Path, with_drafts: WithDrafts) -> Drafting:
    config = with_drafts(settings(directory, dtype="float32"))
    executor = UniExecutor(config, read_model_info(directory), 1)
    facts = executor.load(lambda _phase: None)
    executor.allocate(8, 2)
    found = Drafting(directory, executor, 16, facts)
    found.always = True
    return found


def proposed(instance: Drafting, monkeypatch: pytest.MonkeyPatch) -> tuple[Answers, list[Any]]:
    """Answers of some requests, and all proposals on the way."""
    seen: list[Any] = []
    own = DraftModel.propose

    def propose(self: DraftModel, *arguments: Any) -> Any:
        result = own(self, *arguments)
        seen.append(result.proposals)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(DraftModel, "propose", propose)
        return instance.answers(greedy(3), How(ngrams=True))[0], seen


@pytest.fixture(scope="module", params=["mtp", pytest.param("eagle3", marks=pytest.mark.nightly), SHARED])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WithDrafts]:
    """A model, and how it is drafted for."""
    place = tmp_path_factory.mktemp("drafted")
    directory = PredictingModel(place / "model", "deepseek_v3").directory
    if request.param == "mtp":
        return directory, with_mtp
    RandomHead(place / "head", directory, form="speculators", own_output=request.param == "eagle3")
    return directory, lambda config: with_head(config, place / "head")


def test_proposals_after_an_update_are_those_of_a_fresh_instance(
    made: tuple[Path, WithDrafts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, with_drafts = made
    new, instance = trained(directory, tmp_path / "new"), loaded(directory, with_drafts)
    before, after = proposed(instance, monkeypatch), proposed(loaded(new, with_drafts), monkeypatch)
    assert before[1] != after[1]
    is_layer = with_drafts is with_mtp
    assert instance.executor._drafts is not None
    assert (instance.executor._drafts.bytes_again > 0) == is_layer, "a head is none of the checkpoint's"
    assert any(any(each.values()) for each in after[1])
    weights = instance.executor.new_weights
    weights.prepare(str(new))
    shutil.rmtree(new)
    assert proposed(instance, monkeypatch) == before
    weights.switch()
    assert proposed(instance, monkeypatch) == after
    weights.prepare(str(directory))
    weights.discard()
    assert proposed(instance, monkeypatch) == after
    weights.prepare(str(directory))
    weights.switch()
    assert proposed(instance, monkeypatch) == before


def test_a_version_without_the_layer_is_refused(tmp_path: Path) -> None:
    directory = PredictingModel(tmp_path / "model", "deepseek_v3").directory
    instance = loaded(directory, with_mtp)
    other = shutil.copytree(directory, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsRefused, match="eh_proj"):
        instance.executor.new_weights.prepare(str(other))
