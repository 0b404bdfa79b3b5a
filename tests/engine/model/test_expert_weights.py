"""A rank's share of the experts: the right ones, and no bytes of others read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.config import ModelConfig
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.model.expert_weights import (
    ExpertShare,
    expert_modules,
    expert_parameters,
    only_experts_of,
    read_experts,
)
from engine.model.weight_files import open_weights
from engine.model.weights import load_model
from parallel.placement import assign_experts
from tests.engine.model.test_weights import make_larger
from tests.engine.tiny_models import make_tiny_model

MOE_FAMILIES = ["deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]


@pytest.fixture(scope="module", params=MOE_FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def whole(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def load(directory: Path, share: ExpertShare) -> Any:
    config = transformers.AutoConfig.from_pretrained(directory)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with (
        open_weights(directory, torch.float32) as files,
        only_experts_of(model_class, config, share, files) as tensors,
    ):
        model, report = model_class.from_pretrained(
            None, config=config, state_dict=tensors, output_loading_info=True, dtype=torch.float32
        )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_each_rank_holds_its_experts_and_everything_else(directory: Path, whole: Any, strategy: Any) -> None:
    num_experts = next(iter(expert_modules(whole).values())).num_experts
    for rank in range(3):
        share = ExpertShare(assign_experts(num_experts, 3, strategy), rank)
        model = load(directory, share)
        layers = expert_modules(model)
        assert list(layers) == list(expert_modules(whole))
        for path, module in layers.items():
            assert module.num_experts == len(share.experts)
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter, getattr(whole.get_submodule(path), name)[share.experts])
        of_whole = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[0] not in layers:
                assert torch.equal(parameter, of_whole[name])
    assert next(iter(expert_modules(load_whole(directory)).values())).num_experts == num_experts


def load_whole(directory: Path) -> Any:
    """After a share was read, models are made whole again."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


class _Counting:
    """An open file that notes how many bytes of experts are taken out of it."""

    def __init__(self, file: Any, counted: list[int]) -> None:
        self._file, self._counted = file, counted

    def keys(self) -> Any:
        return self._file.keys()

    def get_tensor(self, name: str) -> Any:
        return self._note(name, self._file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        counting, taken = self, self._file.get_slice(name)

        class Slice:
            def get_shape(self) -> Any:
                return taken.get_shape()

            def __getitem__(self, item: Any) -> Any:
                return counting._note(name, taken[item])

        return Slice()

    def _note(self, name: str, tensor: Any) -> Any:
        if ".experts." in name or "_linear" in name:  # (GraniteMoE's are called input_linear, output_linear)
            self._counted.append(tensor.numel() * tensor.element_size())
        return tensor


def counting(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[int]:
    """Bytes of experts that a module takes out of files from now on, by piece."""
    taken: list[int] = []
    opens = open_weights  # not the name, which may be patched

    @contextmanager
    def open_counted(*which: Any) -> Iterator[list[Any]]:
        with opens(*which) as files:
            yield [_Counting(file, taken) for file in files]

    monkeypatch.setattr(module, "open_weights", open_counted)
    return taken


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return counting(monkeypatch, sys.modules[__name__])


def test_expert_bytes_are_one_share_in_memory_and_from_disk(
    directory: Path, whole: Any, counted: list[int]
) -> None:
    total = expert_bytes(whole)
    num_experts = next(iter(expert_modules(whole).values())).num_experts
    for num_ranks in (2, 4):
        for rank in range(num_ranks):
            counted.clear()
            model = load(directory, ExpertShare(assign_experts(num_experts, num_ranks), rank))
            assert expert_bytes(model) * num_ranks == total
            assert sum(counted) * num_ranks == total


def expert_bytes(model: Any) -> int:
    return sum(
        parameter.numel() * parameter.element_size()
        for module in expert_modules(model).values()
        for parameter in module.parameters()
    )


def test_a_dense_model_has_nothing_to_spread(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    config = transformers.AutoConfig.from_pretrained(directory)
    with (
        pytest.raises(CheckpointError, match="--no-enable-expert-parallel"),
        only_experts_of(
            MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, ExpertShare(assign_experts(2, 2), 0), []
        ),
    ):
        pass


def test_experts_of_a_language_part_are_read_in_the_layout_of_the_whole(tmp_path: Path) -> None:
    """Qwen3-VL's are stored transposed, and under the names of the larger model."""
    whole = make_larger("Qwen3VLMoe", tmp_path)
    info = read_model_info(tmp_path)
    settings = ModelConfig(model=str(tmp_path))
    share = ExpertShare(assign_experts(info.num_experts, 2), 1)
    cpu = torch.device("cpu")
    model = load_model(info, settings, dtype=torch.float32, device=cpu, share=share).module
    others = read_experts(model, tmp_path, [[0, 3]] * len(expert_modules(model)))
    for path, module in expert_modules(model).items():
        expected = whole.model.language_model.get_submodule(path.removeprefix("model."))
        for name, parameter in expert_parameters(module):
            all_experts = getattr(expected, name)
            assert torch.equal(parameter, all_experts[share.experts])
            assert torch.equal(others[f"{path}.{name}"], all_experts[[0, 3]])
