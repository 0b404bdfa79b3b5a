"""New weights in a worker have a fresh one's bits; a refused version changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.messages import MemoryPart
from engine.config import ModelConfig
from engine.executor.uni import UniExecutor
from engine.kernels.core import library
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from engine.model.weight_digest import whole_digest
from engine.model.weight_files import OpenFile
from engine.weight_versions import shard_weights
from engine.weight_versions.assembled import assemble
from engine.weight_versions.contract import WeightsRefused, WeightsSuperseded
from tests.engine.invariance.answers import ALONE, Answers, How, Instance, load, settings
from tests.engine.invariance.mixed import requests
from tests.engine.shard_threads import ThreadedShards
from tests.engine.states.models import make_servable_model
from tests.engine.tiny_models import make_tiny_model
from tests.engine.weight_versions.made import trained
from tests.router.tiny_tokenizer import byte_level

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

VOCAB = 403
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "mixtral": {"intermediate_size": 128},
    "deepseek_v3": {},
}
HYBRIDS = ["qwen3_next", "lfm2_moe", "nemotron_h"]


def make(family: str, into: Path) -> Path:
    """A tiny model of a family, with a tokenizer."""
    if family in HYBRIDS:
        return make_servable_model(into, family)
    changes = {"vocab_size": VOCAB, "max_position_embeddings": 2048, **FAMILIES[family]}
    make_tiny_model(into, family, dtype=torch.bfloat16, **changes)
    byte_level().save(str(into / "tokenizer.json"))
    return into


def submits(directory: Path) -> list[Submit]:
    """Requests of all kinds for a model."""
    return requests(3, count=8, vocab_size=read_model_info(directory).vocab_size, longest=60, most=8)


def answers(instance: Instance, wanted: Sequence[Submit]) -> Answers:
    return instance.answers(wanted, ALONE)[0]


def check_update(directory: Path, new: Path, **device: Any) -> None:
    """Answers around an update are those of an instance that has the weights."""
    wanted, instance = submits(directory), load(directory, **device)
    before, after = answers(instance, wanted), answers(load(new, **device), wanted)
    assert before != after, "the new weights were to change answers"
    weights = instance.executor.new_weights
    digest = weights.prepare(str(new))
    assert digest == whole_digest(sorted(new.glob("*.safetensors")))
    shutil.rmtree(new)  # nothing of a version depends on its files once it is prepared
    assert answers(instance, wanted) == before
    weights.switch()
    assert {each.weights for each in instance.executor.arithmetic()} == {digest}
    assert answers(instance, wanted) == after
    if all(each.is_invariant for each in instance.executor.arithmetic()):
        assert instance.answers(wanted, How(budget=24))[0] == after
    weights.prepare(str(directory))
    weights.switch()
    assert answers(instance, wanted) == before


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_answers_after_an_update_are_those_of_a_fresh_instance(family: str, tmp_path: Path) -> None:
    directory = make(family, tmp_path / "old")
    device = {"batch_invariant": True} if family in HYBRIDS else {}
    check_update(directory, trained(directory, tmp_path / "new"), **device)


def test_a_version_of_some_tensors_is_the_whole_one_to_the_bit(tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "old")
    new = trained(directory, tmp_path / "new", change=lambda name, each: each * (2 if "mlp" in name else 1))
    changed = {name: each for name, each in load_file(new / "model.safetensors").items() if "mlp" in name}
    save_file(changed, tmp_path / "part.safetensors")
    made = assemble(directory, [tmp_path / "part.safetensors"], tmp_path / "made")
    wanted, instance = submits(directory), load(directory)
    weights = instance.executor.new_weights
    assert weights.prepare(str(made)) == whole_digest([new / "model.safetensors"])
    weights.switch()
    assert answers(instance, wanted) == answers(load(new), wanted)


@pytest.mark.parametrize(
    ("family", "device"),
    [("qwen3", {}), ("deepseek_v3", {}), ("llama", {"numerics": "torch", "batch_invariant": True})],
)
def test_memory_that_was_given_back_is_filled_again(
    family: str, device: dict[str, Any], tmp_path: Path
) -> None:
    """Weights and cache of a sleeping instance, before and after an update."""
    directory = make(family, tmp_path / "old")
    new = trained(directory, tmp_path / "new")
    wanted, instance = submits(directory), load(directory, **device)
    executor = instance.executor
    weights = executor.new_weights
    before, after = answers(instance, wanted), answers(load(new, **device), wanted)

    def sleep() -> None:
        assert executor.give_back(MemoryPart.KV_CACHE)
        stored = [tensor for tensors in executor._tensors for tensor in tensors if tensor.nbytes > 50_000]
        assert stored
        assert not any(tensor.view(torch.uint8).flatten()[4096:-4096].any() for tensor in stored)
        assert executor.give_back(MemoryPart.WEIGHTS)
        assert sum(each.untyped_storage().nbytes() for each in executor._model.module.parameters()) < 1000

    sleep()
    assert weights.prepare("") == whole_digest([directory / "model.safetensors"])
    weights.switch()
    assert answers(instance, wanted) == before
    weights.prepare(str(new))
    weights.switch()
    sleep()
    assert weights.prepare("") == whole_digest([new / "model.safetensors"])
    weights.switch()
    assert answers(instance, wanted) == after


def test_torchs_operators_get_new_weights(tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "old")
    new = trained(directory, tmp_path / "new")
    check_update(directory, new, numerics="torch", batch_invariant=True)


@pytest.mark.each_push
@pytest.mark.parametrize(
    ("family", "layout"), [("llama", {"tp": 2}), ("mixtral", {"tp": 2}), ("llama", {"pp": 2})]
)
def test_shards_go_over_together(family: str, layout: dict[str, int], tmp_path: Path) -> None:
    directory = make(family, tmp_path / "old")
    new = trained(directory, tmp_path / "new")
    wanted, info = submits(directory), read_model_info(directory)
    config = settings(directory)
    served = ThreadedShards(config, info, **layout)
    served.load(lambda _phase: None)
    first = Instance(directory, served)
    before = answers(first, wanted)
    shards = [worker.executor.new_weights for worker in served.workers]
    digests = {shard.prepare(str(new)) for shard in shards}
    assert digests == {whole_digest(sorted(new.glob("*.safetensors")))}
    assert answers(first, wanted) == before
    for shard in shards:
        shard.switch()
    fresh = ThreadedShards(settings(new), read_model_info(new), **layout)
    fresh.load(lambda _phase: None)
    assert answers(first, wanted) == answers(Instance(new, fresh), wanted) != before
    served.close()
    fresh.close()


@pytest.mark.parametrize("online", ["int8", "int4"])
def test_quantised_weights_are_rounded_anew(online: str, tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "old")
    new = trained(directory, tmp_path / "new")
    wanted = submits(directory)

    def quantised(path: Path) -> Instance:
        config = msgspec.structs.replace(
            settings(path), model=ModelConfig(model=str(path), dtype="bfloat16", quantization=online)
        )
        executor = UniExecutor(config, read_model_info(path), 1)
        facts = executor.load(lambda _phase: None)
        executor.allocate(8)
        assert executor._program is not None
        assert executor._program.quantized_bytes
        return Instance(path, executor, facts=facts)

    instance = quantised(directory)
    before, after = answers(instance, wanted), answers(quantised(new), wanted)
    weights = instance.executor.new_weights
    weights.prepare(str(new))
    assert answers(instance, wanted) == before
    weights.switch()
    assert answers(instance, wanted) == after != before


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Instance, Answers]:
    """A model, an instance of it, and its answers."""
    directory = make("llama", tmp_path_factory.mktemp("served"))
    instance = load(directory)
    return directory, instance, answers(instance, submits(directory))


def without(name: str, tensors: dict[str, torch.Tensor]) -> None:
    del tensors[name]


def renamed(name: str, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.another.weight"] = tensors.pop(name)


def shortened(name: str, tensors: dict[str, torch.Tensor]) -> None:
    tensors[name] = tensors[name][:-1].clone()


def widened(name: str, tensors: dict[str, torch.Tensor]) -> None:
    tensors[name] = tensors[name].float()


MATRIX = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without, f"lack 1 tensor(s) of this model: {MATRIX}"),
        (renamed, f"lack 1 tensor(s) of this model: {MATRIX}"),
        (shortened, f"{MATRIX} of the new weights has the shape [63, 96], not [64, 96]"),
        (widened, f"{MATRIX} of the new weights has numbers of type F32, not BF16"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(
    change: Any, reason: str, served: tuple[Path, Instance, Answers], tmp_path: Path
) -> None:
    directory, instance, before = served
    new = trained(directory, tmp_path)
    (path,) = new.glob("*.safetensors")
    tensors = load_file(path)
    change(MATRIX, tensors)
    save_file(tensors, path)
    with pytest.raises(WeightsRefused) as refused:
        instance.executor.new_weights.prepare(str(new))
    assert reason in str(refused.value)
    assert answers(instance, submits(directory)) == before


def test_files_that_cannot_be_used_are_refused(
    served: tuple[Path, Instance, Answers], tmp_path: Path
) -> None:
    directory, instance, before = served
    weights = instance.executor.new_weights
    with pytest.raises(WeightsRefused, match=r"no \*\.safetensors file"):
        weights.prepare(str(tmp_path))
    new = trained(directory, tmp_path / "cut")
    (path,) = new.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsRefused, match="where its header promises"):
        weights.prepare(str(new))
    new = trained(directory, tmp_path / "other")
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(WeightsRefused, match=r"of another model: rms_norm_eps is 0\.5, not 1e-06"):
        weights.prepare(str(new))
    assert answers(instance, submits(directory)) == before


def test_a_file_that_changes_while_it_is_read_is_refused(
    served: tuple[Path, Instance, Answers], tmp_path: Path
) -> None:
    directory, instance, before = served
    new = trained(directory, tmp_path)
    (path,) = new.glob("*.safetensors")
    asked = 0

    def write_meanwhile() -> bool:
        nonlocal asked
        asked += 1
        if asked == 5:
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\x01")
        return False

    with pytest.raises(WeightsRefused, match="changed while"):
        instance.executor.new_weights.prepare(str(new), write_meanwhile)
    assert asked > 5
    assert answers(instance, submits(directory)) == before


def test_a_preparation_that_is_not_wanted_any_more_stops(
    served: tuple[Path, Instance, Answers], tmp_path: Path
) -> None:
    directory, instance, before = served
    new, left = trained(directory, tmp_path), iter([False] * 3)
    with pytest.raises(WeightsSuperseded):
        instance.executor.new_weights.prepare(str(new), partial(next, left, True))
    assert answers(instance, submits(directory)) == before


def test_what_was_prepared_can_be_discarded(served: tuple[Path, Instance, Answers], tmp_path: Path) -> None:
    directory, instance, before = served
    weights = instance.executor.new_weights
    weights.prepare(str(trained(directory, tmp_path / "first")))
    weights.discard()
    assert answers(instance, submits(directory)) == before
    second = trained(directory, tmp_path / "second", seed=2)
    weights.prepare(str(trained(directory, tmp_path / "third", seed=3)))
    weights.prepare(str(second))  # takes the place of what was prepared
    weights.switch()
    wanted = submits(directory)
    assert answers(instance, wanted) == answers(load(second), wanted)
    weights.prepare(str(directory))
    weights.switch()
    assert answers(instance, wanted) == before


def test_weights_without_room_beside_those_in_use_are_refused(tmp_path: Path) -> None:
    directory = make("llama", tmp_path)
    executor = UniExecutor(settings(directory), read_model_info(directory), 1)
    executor.load(lambda _phase: None)
    executor.allocate(8)
    weights = shard_weights.ShardWeights(
        executor._info, executor._config.model, executor._model, executor._program,  # type: ignore[arg-type]
        executor._on_disk, lambda: 1 << 18,
    )  # fmt: skip
    with pytest.raises(
        WeightsRefused, match=r"no memory for both versions: 0\.\d MiB are needed .* 0\.2 MiB are"
    ):
        weights.prepare(str(directory))


class LargeLayer:
    """A drafting layer of 64 MiB, which is not prepared here."""

    bytes_again = 1 << 26

    def prepare(self, directory: Path, open_file: OpenFile) -> None:
        raise AssertionError("refused before")


def test_room_for_the_layer_that_drafts_is_needed_too(tmp_path: Path) -> None:
    directory = make("llama", tmp_path)
    executor = UniExecutor(settings(directory), read_model_info(directory), 1)
    executor.load(lambda _phase: None)
    executor.allocate(8)
    weights = shard_weights.ShardWeights(
        executor._info, executor._config.model, executor._model, executor._program,  # type: ignore[arg-type]
        executor._on_disk, lambda: 1 << 25,
    )  # fmt: skip
    weights.prepare(str(directory))
    weights.drafts = LargeLayer()
    with pytest.raises(WeightsRefused, match=r"no memory for both versions: 6\d\.\d MiB are needed"):
        weights.prepare(str(directory))
