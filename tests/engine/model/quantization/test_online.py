"""Plain checkpoints that are quantised while they are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.quantization import ONLINE, OnlineName
from engine.model.checkpoint import CheckpointError, check_quantization
from engine.model.quantization.online import OnlineFiles
from engine.model.quantization.weight_codes import FLOAT8
from engine.model.weight_files import open_weights
from tests.engine.model.quantization.writers import write_quantized
from tests.engine.model.test_weights import greedy_ids, load
from tests.engine.tiny_models import make_tiny_model

SIZE = 192, 256
"""Outputs and inputs: neither blocks nor groups are all whole."""
ERROR = {
    "int8_per_channel_weight_only": 0.02,
    "int8": 0.02,
    "int4": 0.15,
    "fp8_per_channel": 0.04,
    "fp8_per_block": 0.04,
}
"""Largest relative error of a matrix of normal numbers."""


@pytest.fixture
def matrix() -> torch.Tensor:
    generator = np.random.default_rng(7)
    weight = torch.from_numpy(generator.standard_normal(SIZE).astype(np.float32))
    weight[3] = 0
    weight[:, 64:128] *= 8
    return weight.bfloat16()


NAME = "model.layers.0.mlp.up_proj.weight"


def write(directory: Path, **tensors: torch.Tensor) -> Path:
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("name", ONLINE)
def test_parts_are_those_of_the_whole(name: OnlineName, matrix: torch.Tensor, tmp_path: Path) -> None:
    """Weights and codes, for any range that a rank may read."""
    write(tmp_path, **{NAME: matrix})
    with open_weights(tmp_path, torch.float32, name) as (files,):
        whole = files.get_tensor(NAME)
        found = files.get_slice(NAME)
        for rows, columns in (
            (slice(0, 96), slice(None)),
            (slice(None), slice(128, 256)),
            (slice(7, 150), slice(0, 128)),
        ):
            assert torch.equal(found[rows, columns], whole[rows, columns])
            codes = found.read_codes(
                *(slice(*each.indices(size)[:2]) for each, size in zip((rows, columns), SIZE, strict=True))
            )
            assert torch.equal(codes.widened(torch.float32), whole[rows, columns])
    error = (whole - matrix.float()).norm() / matrix.float().norm()
    assert 0 < error < ERROR[name]
    assert not whole[3].any()


def test_codes_are_those_of_numpy(matrix: torch.Tensor, tmp_path: Path) -> None:
    write(tmp_path, **{NAME: matrix})
    weight, every = matrix.float().numpy(), (slice(0, SIZE[0]), slice(0, SIZE[1]))
    found = {}
    for name in ONLINE:
        with open_weights(tmp_path, torch.float32, name) as (files,):
            found[name] = files.get_slice(NAME).read_codes(*every)
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
    expected = np.rint(np.divide(weight, scale, out=np.zeros_like(weight), where=scale > 0))
    assert np.array_equal(found["int8"].codes.numpy(), expected)
    assert found["int8"].rounding is not None
    assert found["int8_per_channel_weight_only"].rounding is None
    groups = weight.reshape(SIZE[0], -1, 128)
    least, most = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    greatest = np.where(-least >= most, least, most)
    mantissas, exponents = np.frexp(greatest / np.float32(-8))
    scale = np.ldexp(np.rint(mantissas * 32) / np.float32(32), exponents)  # of 5 significant bits
    codes = np.rint(np.divide(groups, scale, out=np.zeros_like(groups), where=scale != 0)).clip(-8, 7)
    assert np.array_equal(found["int4"].codes.numpy(), codes.reshape(SIZE))
    assert np.array_equal(found["int4"].scales.numpy(), scale[..., 0])
    blocks = (
        torch.nn.functional.pad(matrix.float(), (0, 0, 0, 64)).unflatten(0, (2, 128)).unflatten(2, (2, 128))
    )
    scales = blocks.abs().amax((1, 3)) / 448
    assert torch.equal(found["fp8_per_block"].scales, scales.repeat_interleave(128, 0)[: SIZE[0]])
    one = (matrix.float() / found["fp8_per_channel"].scales.clamp(min=1e-30)).to(FLOAT8)
    assert torch.equal(found["fp8_per_channel"].codes.view(FLOAT8).float(), one.float())


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_give_the_weights_that_were_read(
    name: OnlineName, dtype: torch.dtype, matrix: torch.Tensor, tmp_path: Path
) -> None:
    """Again and again: reading changes nothing."""
    write(tmp_path, **{NAME: matrix.to(dtype)})
    with open_weights(tmp_path, torch.bfloat16, name) as (files,):
        found, weights = files.get_slice(NAME), files.get_tensor(NAME)
        for _ in range(2):
            assert found.read_codes(slice(0, SIZE[0]), slice(0, SIZE[1])).gives(weights)
            assert torch.equal(files.get_tensor(NAME), weights)


def test_only_matrices_of_layers_are_quantised(matrix: torch.Tensor, tmp_path: Path) -> None:
    kept = {
        "model.embed_tokens.weight": matrix.clone(),
        "lm_head.weight": matrix.clone(),
        "model.layers.0.mlp.gate.weight": matrix.clone(),
        "model.layers.0.input_layernorm.weight": matrix[0].clone(),
    }
    write(tmp_path, **{NAME: matrix}, **kept)
    with open_weights(tmp_path, torch.bfloat16, "int4") as (files,):
        assert isinstance(files, OnlineFiles)
        assert list(files.matrices) == [NAME]
        assert sorted(files.keys()) == sorted([NAME, *kept])
        for name, tensor in kept.items():
            assert torch.equal(files.get_tensor(name), tensor)


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    write(tmp_path, **{"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 64, 64)})
    with (
        pytest.raises(CheckpointError, match="holds all experts of a layer"),
        open_weights(tmp_path, torch.float32, "int8"),
    ):
        pass


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("plain"), "llama")


@pytest.mark.parametrize("name", ["int8_per_channel_weight_only", "int4", "fp8_per_block"])
def test_answers_are_those_of_the_widened_model(name: OnlineName, plain: Path, tmp_path: Path) -> None:
    with open_weights(plain, torch.float32, name) as (files,):
        wide = {each: files.get_tensor(each) for each in files.keys()}  # noqa: SIM118
    for each in plain.glob("*.json"):
        (tmp_path / each.name).write_bytes(each.read_bytes())
    save_file(wide, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_file(plain / "model.safetensors").keys() == wide.keys()
    assert greedy_ids(load(plain, quantization=name)) == greedy_ids(load(tmp_path))


def test_what_does_not_go_together_is_refused_before_anything_is_read(plain: Path, tmp_path: Path) -> None:
    check_quantization(plain, "int8", reads_weights=True)
    check_quantization(plain, None, reads_weights=False)
    with pytest.raises(CheckpointError, match="has plain weights"):
        check_quantization(plain, "gptq", reads_weights=True)
    with pytest.raises(CheckpointError, match="--load-format dummy"):
        check_quantization(plain, "int8", reads_weights=False)
    write_quantized(plain, "gptq", tmp_path / "quantized", tmp_path / "wide")
    (tmp_path / "quantized" / "model.safetensors").unlink()
    check_quantization(tmp_path / "quantized", "gptq", reads_weights=True)
    for name in ("awq", "int4"):
        with pytest.raises(CheckpointError, match="quantised by gptq"):
            check_quantization(tmp_path / "quantized", name, reads_weights=True)
    assert json.loads((plain / "config.json").read_text()).get("quantization_config") is None
