"""Adapters' files: what is read, and what is refused before a model is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from coordinator.messages import AdapterSource
from engine.adapters.adapter_files import Adapter, read_adapter
from engine.adapters.adapter_settings import CONFIG, WEIGHTS, AdapterError, digest_of, read_settings, settled
from engine.config import DeviceConfig, EngineConfig, ModelConfig
from engine.config.lora import LoraConfig
from engine.model.errors import CheckpointError
from engine.settings import resolve
from tests.engine.adapters.made_adapters import make_adapter
from tests.engine.native_families import make_family


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_family(path, "llama")
    return path


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    make_adapter(model, tmp_path / "adapter", rank_pattern={"q_proj": 3}, alpha_pattern={"v_proj": 4})
    return tmp_path / "adapter"


def read(model: Path, adapter: Path, most_rank: int = 16, digest: str = "") -> Adapter:
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return read_adapter(AdapterSource("one", str(adapter), digest), whole, most_rank)


def change(adapter: Path, **settings: Any) -> None:
    found = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(found | settings))


def test_ranks_and_scalings_are_those_of_peft(model: Path, adapter: Path) -> None:
    found = read(model, adapter)
    parts = {name.rpartition(".")[2]: part for name, part in found.parts.items() if ".0." in name}
    assert found.rank == 8
    assert [len(parts[name].a) for name in ("q_proj", "k_proj", "down_proj")] == [3, 8, 8]
    assert parts["q_proj"].scaling == pytest.approx(16 / 3)
    assert [parts[name].scaling for name in ("k_proj", "v_proj")] == [2.0, 0.5]
    stored = load_file(adapter / WEIGHTS)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(parts["q_proj"].a, stored[name])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "trains biases"),
        ({"peft_type": "IA3"}, "kind IA3"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "no parameter was matched"),
        ({"target_modules": ["nothing"]}, "PEFT refuses it for this model"),
        (
            {"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
            "lacks lora_embedding_A of model.embed_tokens",
        ),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "lacks lora_A of lm_head"),
        ({"target_modules": ["q_proj", "v_proj"]}, "tensors that belong to no layer of this model"),
        ({"r": 5}, r"is \[8, 64\], this model needs \[5, 64\]"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    model: Path, adapter: Path, settings: dict[str, Any], says: str
) -> None:
    change(adapter, **settings)
    with pytest.raises(AdapterError, match=says):
        read(model, adapter)


def test_broken_files_are_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="rank 8: --max-lora-rank is 4"):
        read(model, adapter, most_rank=4)
    with pytest.raises(AdapterError, match=re.escape(CONFIG)):
        read(model, tmp_path)
    whole = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(AdapterError, match=re.escape(WEIGHTS)):
        read(model, adapter)
    tensors = load_file_of(whole, tmp_path)
    name = next(iter(tensors))
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, adapter / WEIGHTS)
    with pytest.raises(AdapterError, match="not finite"):
        read(model, adapter)
    (adapter / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=f"has no {WEIGHTS}"):
        read(model, adapter)


def load_file_of(whole: bytes, directory: Path) -> dict[str, torch.Tensor]:
    (directory / "copy").write_bytes(whole)
    return load_file(directory / "copy")


def test_the_digest_is_of_what_decides_answers(model: Path, adapter: Path, tmp_path: Path) -> None:
    def digest() -> str:
        return digest_of(adapter, read_settings(adapter))

    first = digest()
    change(adapter, base_model_name_or_path="elsewhere", lora_dropout=0.5, inference_mode=False)
    assert digest() == first
    targets = json.loads((adapter / CONFIG).read_text())["target_modules"]
    change(adapter, target_modules=targets[::-1])
    assert digest() == first
    change(adapter, lora_alpha=17)
    assert digest() != first
    source = settled(AdapterSource("one", str(adapter)))
    assert source.digest == digest()
    change(adapter, lora_alpha=16)
    with pytest.raises(AdapterError, match="is not the one that the mesh serves as one"):
        settled(source)


def test_flags_name_adapters() -> None:
    config = LoraConfig(enable_lora=True, lora_modules=("a=/x=y", '{"name": "b", "path": "/z"}'))
    assert config.sources == (AdapterSource("a", "/x=y"), AdapterSource("b", "/z"))
    for modules, says in (
        (("a=/x", "a=/y"), "names a twice"),
        (("a",), "takes NAME=DIRECTORY"),
        (('{"name": "a"}',), "takes NAME=DIRECTORY"),
        (('{"name": "a", "path": "/x", "rank": 3}',), "knows no rank"),
    ):
        with pytest.raises(ValueError, match=says):
            LoraConfig(enable_lora=True, lora_modules=modules)
    with pytest.raises(ValueError, match="needs --enable-lora"):
        LoraConfig(lora_modules=("a=/x",))


def test_an_adapter_cannot_have_the_models_name(model: Path, adapter: Path) -> None:
    """Else requests of the model would be answered by the adapter."""
    lora = LoraConfig(enable_lora=True, lora_modules=(f"base={adapter}",))
    named = ModelConfig(model=str(model), served_model_name=("other", "base"))
    with pytest.raises(CheckpointError, match="base is the model's own name"):
        resolve(EngineConfig(model=named, lora=lora))
    settings = resolve(EngineConfig(model=ModelConfig(model=str(model)), lora=lora))[1]
    assert settings.lora is not None
    assert [source.name for source in settings.lora.adapters] == ["base"]


def test_adapters_are_refused_on_gpus(adapter: Path) -> None:
    lora = LoraConfig(enable_lora=True, lora_modules=(f"one={adapter}",))
    with pytest.raises(ValueError, match="--enable-lora is not built for GPUs"):
        EngineConfig(device=DeviceConfig(device="cuda"), lora=lora)
