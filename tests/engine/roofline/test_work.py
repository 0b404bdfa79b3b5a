"""Least work of steps, and the process that times them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from engine.config import ModelConfig
from engine.config.quantization import OnlineName
from engine.kernels.core import library
from engine.kernels.decoder import DecoderModel, recognise
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.weights import load_model
from engine.roofline import __main__ as process
from engine.roofline.facts import RooflineFacts, RooflineRequest
from engine.roofline.work import work_of
from tests.engine.tiny_models import make_tiny_model

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")


def laid_out(directory: Path, quantization: OnlineName | None = None) -> tuple[DecoderModel, Program]:
    assert KERNELS is not None
    settings = ModelConfig(model=str(directory), quantization=quantization)
    info = read_model_info(directory)
    model = load_model(info, settings, dtype=torch.bfloat16, device=torch.device("cpu"))
    decoder = recognise(model.module, model.layers, torch.bfloat16)
    return decoder, Program(KERNELS, decoder)


def test_a_step_reads_all_weights_of_a_dense_model_and_its_keys_and_values(tmp_path: Path) -> None:
    decoder, program = laid_out(make_tiny_model(tmp_path / "model", "llama", dtype=torch.bfloat16))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    dim = config["hidden_size"] // config["num_attention_heads"]
    row = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * dim * 2
    one, two = (work_of(decoder, program, [(99, 1)] * batch, batch) for batch in (1, 2))
    assert one.read_bytes == program.weight_bytes + 100 * row
    assert two.read_bytes == program.weight_bytes + 200 * row
    pairs = 4 * config["num_hidden_layers"] * config["num_attention_heads"] * dim * 100
    assert one.operations == program.weight_bytes + pairs  # two for each weight of two bytes
    assert two.operations == 2 * one.operations


def test_fewer_rows_read_fewer_experts(tmp_path: Path) -> None:
    decoder, program = laid_out(make_tiny_model(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16))
    few, many, all_of_them = (
        work_of(decoder, program, [(0, 1)] * batch, batch).read_bytes for batch in (1, 4, 4096)
    )
    cached = (
        work_of(decoder, program, [(1, 1)], 1).read_bytes - work_of(decoder, program, [(0, 1)], 1).read_bytes
    )
    assert few < many - 3 * cached < program.weight_bytes
    assert all_of_them == pytest.approx(program.weight_bytes + 4096 * cached)


def test_codes_are_counted_as_they_are_laid_out(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model", "llama", dtype=torch.bfloat16)
    plain, coded = (laid_out(directory, name) for name in (None, "int8_per_channel_weight_only"))
    works = [work_of(*each, [(0, 1)], 1) for each in (plain, coded)]
    assert works[0].operations == works[1].operations
    saved = plain[1].weight_bytes - coded[1].weight_bytes
    assert saved > 0
    assert works[0].read_bytes - works[1].read_bytes == saved


def test_the_process_prints_times_and_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_tiny_model(tmp_path / "model", "llama", dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    request = RooflineRequest(str(directory), threads, batches=(1, 3), times=4)
    assert process.main([msgspec.json.encode(request).decode()]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=RooflineFacts)
    assert [step.batch for step in found.steps] == [1, 3]
    assert all(step.seconds > 0 for step in found.steps)
    assert found.steps[1].operations == 3 * found.steps[0].operations


def test_what_cannot_be_measured_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = RooflineRequest(str(tmp_path / "absent"), 1)
    assert process.main([msgspec.json.encode(request).decode()]) == 1
    assert "absent" in capsys.readouterr().err
