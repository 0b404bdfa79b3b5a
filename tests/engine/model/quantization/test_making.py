"""Quantised copies of checkpoints: what compressed-tensors' own library makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from engine.config import QUANTIZED_MODELS, SHIPPED_MODEL
from engine.model import finding
from engine.model.checkpoint import fingerprint, read_model_info
from engine.model.finding import MODELS_DIRECTORY, find_model
from engine.model.quantization.making import Kind, quantize_checkpoint
from engine.model.weight_files import open_weights
from tests.engine.model.test_weights import greedy_ids, load
from tests.engine.tiny_models import make_tiny_model

K_PROJ = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_library_finds_the_weights_that_are_served(kind: Kind, tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path / "plain", "llama", dtype=torch.bfloat16)
    made = tmp_path / "made"
    quantize_checkpoint(plain, made, kind)
    stored, before = load_file(made / "model.safetensors"), load_file(plain / "model.safetensors")
    described = json.loads((made / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(described).config_groups["group_0"]
    compressor = BaseCompressor.load_from_registry(described["format"])
    parts = {
        name.removeprefix(f"{K_PROJ}."): each
        for name, each in stored.items()
        if name.startswith(f"{K_PROJ}.")
    }
    widened = compressor.decompress(parts, scheme)["weight"]
    with open_weights(made, torch.bfloat16) as (files,):
        found = files.get_tensor(f"{K_PROJ}.weight")
        assert torch.equal(found, widened.bfloat16())
        assert torch.equal(files.get_tensor("lm_head.weight"), before["lm_head.weight"])
    if kind == "int4":  # scales and codes have as many significant bits as a bfloat16
        codes = found.float() / parts["weight_scale"].float().repeat_interleave(32, -1)
        assert torch.equal(codes, codes.round())
    error = (found.float() - before[f"{K_PROJ}.weight"].float()).norm() / found.float().norm()
    assert error < (0.01 if kind == "int8" else 0.1)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_experts_are_quantised_and_routers_are_not(kind: Kind, tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path / "plain", "qwen3_moe", moe_intermediate_size=64)
    quantize_checkpoint(plain, tmp_path / "made", kind)
    names = set(load_file(tmp_path / "made" / "model.safetensors"))
    part = "weight" if kind == "int8" else "weight_packed"
    assert {f"model.layers.0.mlp.experts.3.down_proj.{each}" for each in (part, "weight_scale")} <= names
    assert "model.layers.0.mlp.gate.weight" in names
    assert "model.layers.0.mlp.gate.weight_scale" not in names
    assert len(greedy_ids(load(tmp_path / "made"))) == 6


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path / "plain", "llama", intermediate_size=80)
    with pytest.raises(ValueError, match=r"down_proj has 80 inputs, which are no groups of 32"):
        quantize_checkpoint(plain, tmp_path / "made", "int4")
    quantize_checkpoint(plain, tmp_path / "made", "int8")
    with pytest.raises(ValueError, match="is quantised already"):
        quantize_checkpoint(tmp_path / "made", tmp_path / "again", "int8")


def test_the_shipped_model_is_made_in_fewer_bits_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finding, "own_directory", lambda _name: tmp_path)
    caplog.set_level("INFO")
    found = [find_model(name) for name in QUANTIZED_MODELS for _ in range(2)]
    assert len(set(found)) == 2
    assert [line for line in caplog.messages if line.startswith("making")] == [
        f"making {name} of {SHIPPED_MODEL}, once" for name in QUANTIZED_MODELS
    ]
    plain = MODELS_DIRECTORY / SHIPPED_MODEL
    assert len({fingerprint(read_model_info(each)) for each in (plain, *found)}) == 3
    sizes = [(each / "model.safetensors").stat().st_size for each in (plain, found[0], found[2])]
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.4 * sizes[0]
    assert read_model_info(found[0]).num_experts == 8
