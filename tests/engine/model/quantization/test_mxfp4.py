"""GPT-OSS's experts in MXFP4: weights equal what transformers widens them to, and codes give them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from engine.attention.base import PackedRows
from engine.config import ModelConfig
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.make import make_program
from engine.model.checkpoint import CheckpointError, format_of_weights, read_model_info
from engine.model.expert_weights import read_experts
from engine.model.quantization.attached import codes_of
from engine.model.quantization.stacks import Mxfp4Matrix
from engine.model.weight_files import open_weights
from engine.model.weights import load_model
from tests.engine.model.quantization.writers import write_mxfp4
from tests.engine.model.test_weights import change_tensors, greedy_ids, load
from tests.engine.tiny_models import make_tiny_model

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in ``quantized``, and its widened copy in ``wide``."""
    directory = tmp_path_factory.mktemp("mxfp4")
    plain = make_tiny_model(directory / "plain", "gpt_oss", layers=2)
    write_mxfp4(plain, directory / "quantized", directory / "wide")
    return directory


def test_weights_are_those_that_transformers_finds(directory: Path, tmp_path: Path) -> None:
    """Those of all experts and of some, with the least and the greatest scales, too."""
    write_mxfp4(directory / "plain", tmp_path / "quantized", tmp_path / "wide", (0, 252))
    for each in (directory, tmp_path):
        expected = load_file(each / "wide" / "model.safetensors")
        with open_weights(each / "quantized", torch.float32) as (files,):
            assert sorted(files.keys()) == sorted(expected)
            for name, weight in expected.items():
                found = files.get_slice(name)
                assert list(found.get_shape()) == list(weight.shape)
                assert torch.equal(files.get_tensor(name), weight), name
                assert torch.equal(found[1:3], weight[1:3]), name
        with open_weights(each / "quantized", torch.bfloat16) as (files,):
            assert torch.equal(files.get_tensor(GATE_UP), expected[GATE_UP].bfloat16())


def test_a_matrix_is_read_in_ranges_that_cut_blocks(directory: Path) -> None:
    expected = load_file(directory / "wide" / "model.safetensors")[GATE_UP][2].T
    form = format_of_weights(directory / "quantized")
    assert form is not None
    with safe_open(directory / "quantized" / "model.safetensors", "pt") as file:
        parts = {part: file.get_slice(f"{GATE_UP}_{part}") for part in ("blocks", "scales")}
        matrix = Mxfp4Matrix(GATE_UP, parts, form, torch.float32, 2)
        for rows, columns in (
            (slice(3, 21), slice(0, 64)),
            (slice(0, 192), slice(5, 43)),
            (slice(1, 2),) * 2,
        ):
            assert torch.equal(matrix[rows, columns], expected[rows, columns])
        codes = matrix.read_codes(slice(3, 21), slice(32, 64))
        assert codes is not None
        assert codes.gives(expected[3:21, 32:64].contiguous())
        assert matrix.read_codes(slice(0, 9), slice(5, 43)) is None


def test_answers_are_those_of_the_widened_model(directory: Path) -> None:
    assert greedy_ids(load(directory / "quantized")) == greedy_ids(load(directory / "wide"))


def test_experts_that_are_read_later_know_their_codes(directory: Path) -> None:
    """As after a death, some of each layer, in any order."""
    model = load(directory / "wide").module
    found = read_experts(model, directory / "quantized", [[3, 1], [0]])
    expected = load_file(directory / "wide" / "model.safetensors")
    for layer, experts in enumerate(([3, 1], [0])):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            assert torch.equal(found[name], expected[name][experts])
            codes = codes_of(found[name])
            assert codes is not None
            assert codes.gives(found[name].mT.contiguous())


@pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")
def test_experts_stay_codes_and_give_the_same_bits(directory: Path) -> None:
    logits, count = [], 20
    table = np.arange(2, dtype=np.int32)[None]
    rows = PackedRows(np.array([0]), np.array([count]), table, np.arange(count), 0)
    for each in ("quantized", "wide"):
        info = read_model_info(directory / each)
        model = load_model(info, ModelConfig(), dtype=torch.bfloat16, device=torch.device("cpu"))
        program = make_program(model, 16)
        assert program is not None
        assert (program.quantized_bytes > 0) == (each == "quantized")
        program.use(NativeCache(model.layers, num_blocks=2, block_size=16, dtype=model.dtype))
        logits.append(program.forward(rows, np.arange(count) + 5, np.arange(count)).clone())
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{GATE_UP}_scales"), f"{GATE_UP} is quantised and lacks scales"),
        (lambda t: t.pop(f"{GATE_UP}_blocks"), f"{GATE_UP} is quantised and lacks blocks"),
        (lambda t: t[f"{GATE_UP}_scales"].fill_(255), f"{GATE_UP}: scales has a scale that is no number"),
        (
            lambda t: t.update({f"{GATE_UP}_scales": torch.zeros(4, 192, 3, dtype=torch.uint8)}),
            r"scales have the shape \[4, 192, 3\] for blocks of \[4, 192, 2\]",
        ),
        (
            lambda t: t.update({f"{GATE_UP}_blocks": torch.zeros(4, 192, 2, 8, dtype=torch.uint8)}),
            "blocks have 8 numbers: 16 bytes are expected",
        ),
        (lambda t: t.update({f"{GATE_UP}_scales": torch.zeros(4, 192, 2)}), "no exponents of 8 bits"),
    ],
)
def test_a_broken_checkpoint_is_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], object], says: str, directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory / "quantized", tmp_path / "broken")
    change_tensors(tmp_path / "broken", change)
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path / "broken")
