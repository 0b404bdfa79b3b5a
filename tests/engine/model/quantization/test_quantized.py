"""Quantised checkpoints: weights equal what the formats' own libraries widen them to, in any part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.model.checkpoint import CheckpointError, check_servable
from engine.model.expert_weights import ExpertShare, only_experts_of
from engine.model.sharding.shard import Shard, sharded_class
from engine.model.sharding.shard_weights import read_shard
from engine.model.weight_files import open_weights
from parallel.placement import assign_experts
from tests.engine.model.quantization.writers import KINDS, LINEAR, write_quantized
from tests.engine.model.test_weights import greedy_ids, load
from tests.engine.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("plain"), "llama")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_the_library_finds(kind: str, plain: Path, tmp_path: Path) -> None:
    """Whole, and in ranges that cut words, groups and blocks."""
    write_quantized(plain, kind, tmp_path / "quantized", tmp_path / "wide")
    expected = load_file(tmp_path / "wide" / "model.safetensors")
    with open_weights(tmp_path / "quantized", torch.float32) as (files,):
        assert sorted(files.keys()) == sorted(expected)
        for name, weight in expected.items():
            found = files.get_slice(name)
            assert list(found.get_shape()) == list(weight.shape)
            torch.testing.assert_close(files.get_tensor(name), weight, rtol=0, atol=0)
            if not LINEAR.search(name):
                continue
            for rows, columns in (
                (slice(3, 21), slice(None)),
                (slice(None), slice(5, 43)),
                (slice(1, 2),) * 2,
            ):
                assert torch.equal(found[rows, columns], weight[rows, columns])
            assert torch.equal(found[7:9], weight[7:9])
    with open_weights(tmp_path / "quantized", torch.bfloat16) as (files,):
        name = next(filter(LINEAR.search, expected))
        assert torch.equal(files.get_tensor(name), expected[name].bfloat16())


@pytest.mark.parametrize("kind", ["w4a16 asymmetric", "deepseek's fp8", "gptq", "awq"])
def test_answers_are_those_of_the_widened_model(kind: str, plain: Path, tmp_path: Path) -> None:
    write_quantized(plain, kind, tmp_path / "quantized", tmp_path / "wide")
    assert greedy_ids(load(tmp_path / "quantized")) == greedy_ids(load(tmp_path / "wide"))


def spoil(directory: Path, change: Any) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


K_PROJ = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("awq", lambda t: t.pop(f"{K_PROJ}.scales"), f"{K_PROJ}.weight is quantised and lacks scales"),
        ("w4a16 groups", lambda t: t.pop(f"{K_PROJ}.weight_shape"), "lacks weight_shape"),
        ("gptq", lambda t: t[f"{K_PROJ}.scales"][0].fill_(float("nan")), "k_proj.weight: scales has a scale that is no number"),
        ("gptq", lambda t: t[f"{K_PROJ}.g_idx"].fill_(99), "g_idx names a group that none of its 4 is"),
        ("deepseek's fp8", lambda t: t.update({f"{K_PROJ}.weight_scale_inv": torch.ones(1, 4)}), "does not fit 32 x 64"),
        ("w4a16 groups", lambda t: t.update({f"{K_PROJ}.weight_scale": torch.ones(32, 5)}), "64 inputs are not 5 groups of 16, as config.json says"),
        ("w4a16 groups", lambda t: t.update({f"{K_PROJ}.weight_scale": torch.ones(32, 2)}), "64 inputs are not 2 groups of 16, as config.json says.*group_size"),
        ("awq", lambda t: t.update({f"{K_PROJ}.scales": torch.ones(2, 32), f"{K_PROJ}.qzeros": t[f"{K_PROJ}.qzeros"][:2].clone()}), "64 inputs are not 2 groups of 16"),
        ("gptq in another order", lambda t: t.update({f"{K_PROJ}.scales": torch.ones(3, 32), f"{K_PROJ}.qzeros": t[f"{K_PROJ}.qzeros"][:3].clone()}), "64 inputs are not 3 groups of 16"),
        ("w4a16 groups", lambda t: t[f"{K_PROJ}.weight_shape"].fill_(100), "weight_shape says"),
        ("w4a16 in another order", lambda t: t[f"{K_PROJ}.weight_g_idx"].fill_(9), "weight_g_idx names a group that none of its 4 is"),
        ("w4a16 asymmetric", lambda t: t.update({f"{K_PROJ}.weight_zero_point": torch.zeros(1, 1, dtype=torch.int32)}), "weight_zero_point does not fit scales of 32 x 4"),
        ("w8 asymmetric", lambda t: t.update({f"{K_PROJ}.weight_zero_point": torch.zeros(3, 1, dtype=torch.int8)}), "weight_zero_point has not the shape of weight_scale"),
        ("w8a8 per channel", lambda t: t.update({f"{K_PROJ}.weight_scale": torch.ones(31, 1)}), "for 32 outputs. The checkpoint is broken: download it again"),
    ],
)  # fmt: skip
def test_a_broken_checkpoint_is_refused_by_name(
    kind: str, change: Any, says: str, plain: Path, tmp_path: Path
) -> None:
    write_quantized(plain, kind, tmp_path / "quantized", tmp_path / "wide")
    spoil(tmp_path / "quantized", change)
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path / "quantized")


def test_experts_of_a_layer_are_quantised_together(tmp_path: Path) -> None:
    """As they are not where ``ignore`` names some of them."""
    plain = make_tiny_model(tmp_path / "plain", "qwen3_moe")
    write_quantized(plain, "w4a16 groups", tmp_path / "quantized", tmp_path / "wide")
    name = "model.layers.1.mlp.experts.5.up_proj"

    def ignore(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            tensors.pop(f"{name}.{part}")
        tensors[f"{name}.weight"] = load_file(plain / "model.safetensors")[f"{name}.weight"]

    spoil(tmp_path / "quantized", ignore)
    with pytest.raises(CheckpointError, match=f"{name}.weight is not quantised and .*up_proj.weight is"):
        load(tmp_path / "quantized")


def test_a_config_without_quantised_weights_is_refused(plain: Path, tmp_path: Path) -> None:
    write_quantized(plain, "awq", tmp_path / "quantized", tmp_path / "wide")
    config = (tmp_path / "quantized" / "config.json").read_text()
    (tmp_path / "wide" / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match="quantised by awq, and no tensor is"):
        load(tmp_path / "wide")


def groups(**weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": 4} | weights}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "by bitsandbytes"),
    "torchao": ({"quant_method": "torchao"}, "by torchao"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "by modelopt"),
    "nvfp4": (groups() | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
    "sparse": (groups() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse format"),
    "rotations": (groups() | {"transform_config": {"config_groups": {}, "x": 1}}, "transforms"),
    "no groups": ({"quant_method": "compressed-tensors"}, "config_groups"),
    "blocks": (groups(block_structure="4"), "blocks of size '4'"),
    "gptq of 3 bits": ({"quant_method": "gptq", "bits": 3}, "with 3 bits"),
    "marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "layout marlin"),
    "awq of another layout": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout gemv"),
    "mlx": ({"group_size": 64, "bits": 4}, "by mlx"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_before_anything_is_read(case: str, plain: Path, tmp_path: Path) -> None:
    found, says = REFUSED[case]
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": found}))
    with pytest.raises(CheckpointError, match=says):
        check_servable(tmp_path, trust_remote_code=False)


@pytest.mark.parametrize(
    "kind", ["w4a16 asymmetric", "w8a8 per channel", "deepseek's fp8", "gptq in another order", "awq"]
)
def test_ranks_read_their_part_of_a_quantised_matrix(kind: str, plain: Path, tmp_path: Path) -> None:
    """Cuts lie between words and blocks, and within them."""
    write_quantized(plain, kind, tmp_path / "quantized", tmp_path / "wide")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "wide")
    for rank in range(2):
        sharded = sharded_class(transformers.LlamaForCausalLM, config, Shard(rank=rank, size=2))
        with open_weights(tmp_path / "quantized", torch.float32) as files:
            found = read_shard(sharded, files, None)
        with open_weights(tmp_path / "wide", torch.float32) as files:
            expected = read_shard(sharded, files, None)
        assert found.keys() == expected.keys()
        for name, part in expected.items():
            assert torch.equal(found[name], part), name


@pytest.mark.parametrize("kind", ["w4a16 groups", "gptq"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_instances_read_their_share_of_quantised_experts(family: str, kind: str, tmp_path: Path) -> None:
    write_quantized(make_tiny_model(tmp_path, family), kind, tmp_path / "quantized", tmp_path / "wide")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "wide")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    share = ExpertShare(assign_experts(8, 2), 1)
    with (
        open_weights(tmp_path / "quantized", torch.float32) as quantized,
        open_weights(tmp_path / "wide", torch.float32) as wide,
        only_experts_of(model_class, config, share, quantized) as found,
        only_experts_of(model_class, config, share, wide) as expected,
    ):
        assert found.keys() == expected.keys()
        assert any(".experts.3." in name for name in found)
        for name, part in expected.items():
            assert torch.equal(found[name], part), name
    ids = greedy_ids(load(tmp_path / "quantized"))
    assert ids == greedy_ids(load(tmp_path / "wide"))
