"""Models that the native kernels take: only those whose code they can stand in for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.kernels import make, trial
from engine.kernels.core import library
from engine.kernels.decoder import recognise
from engine.kernels.make import bytes_for_program, make_program
from engine.kernels.narrow import NarrowCopy
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.expert_weights import ExpertShare
from engine.model.weights import LoadedModel, load_model
from parallel.expert_parallel import ATTRIBUTE as EXPERTS_ATTRIBUTE
from parallel.placement import assign_experts
from tests.engine.model.sharding.test_sharding import LAYOUTS, shards
from tests.engine.model.test_weights import make_larger
from tests.engine.native_families import ALIKE, CONTEXT, NATIVE, ORIGINAL, TRIED, make_family

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")

DTYPES = [torch.float32, torch.bfloat16]
BLOCK_SIZE = 16


def load(directory: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(read_model_info(directory), ModelConfig(), dtype=dtype, device=torch.device("cpu"))


@pytest.mark.diagonal("family", "dtype", columns=2, each=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", TRIED)
def test_families_that_the_kernels_know_are_computed_by_them(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert make_program(load(make_family(tmp_path, family), dtype), BLOCK_SIZE) is not None


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"])
def test_language_parts_whose_positions_have_one_axis_for_text_are_computed_by_them(
    kind: str, tmp_path: Path
) -> None:
    make_larger(kind, tmp_path)
    for dtype in DTYPES:
        assert make_program(load(tmp_path, dtype), BLOCK_SIZE) is not None, dtype


@pytest.mark.parametrize("family", ALIKE)
def test_families_with_the_same_parts_that_compute_something_else_are_left_to_torch(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_family(tmp_path, family)
    for dtype in DTYPES:
        model = load(directory, dtype)
        caplog.clear()
        with caplog.at_level("INFO"):
            assert make_program(model, BLOCK_SIZE) is None, dtype
        assert "native kernels: off for this model" in caplog.text
        assert all(weight.numel() for weight in model.module.parameters()), "torch needs them"


# ---- what a forward pass may do besides

Forward = Callable[..., Any]
Change = Callable[[Any, Forward], Forward]


def scaled(factor: float) -> Change:
    return lambda _module, own: lambda *given, **more: own(*given, **more) * factor


def clamped(limit: float) -> Change:
    return lambda _module, own: lambda *given, **more: own(*given, **more).clamp(-limit, limit)


def attention_from(position: int, factor: float) -> Change:
    """Attention whose output is multiplied at later positions."""

    def change(_module: Any, own: Forward) -> Forward:
        def forward(*given: Any, **more: Any) -> Any:
            result, weights = own(*given, **more)
            late = more["position_ids"][0, :, None] >= position
            return torch.where(late, result * factor, result), weights

        return forward

    return change


def softened(limit: float) -> Change:
    return lambda _module, own: lambda *given, **more: limit * torch.tanh(own(*given, **more) / limit)


PLANTED: dict[str, tuple[str, Change]] = {
    "queries are clipped": ("layers.2.self_attn.q_proj", clamped(8.0)),
    "values are clipped": ("layers.2.self_attn.v_proj", clamped(8.0)),
    "the gate is clipped": ("layers.1.mlp.gate_proj", clamped(7.0)),
    "a norm adds one": ("layers.0.input_layernorm", lambda module, own: lambda rows: own(rows) + rows),
    "an MLP has a multiplier": ("layers.2.mlp", scaled(1.001)),
    "attention changes at the original context": ("layers.1.self_attn", attention_from(ORIGINAL, 1.01)),
    "attention changes behind it": ("layers.1.self_attn", attention_from(ORIGINAL + 1, 1.01)),
    "attention changes at the end of the context": ("layers.1.self_attn", attention_from(CONTEXT - 2, 1.01)),
    "logits are softened": ("lm_head", softened(30.0)),
    "the last norm has a multiplier": ("norm", scaled(1.001)),
    "the embedding has a multiplier": ("embed_tokens", scaled(1.01)),
}


@pytest.mark.diagonal("what", "dtype", columns=2, each=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", PLANTED)
def test_a_term_that_is_planted_anywhere_is_found(
    what: str, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it acts on large numbers, on few positions or in one layer only."""
    path, change = PLANTED[what]
    model = load(make_family(tmp_path, "llama_llama3"), dtype)
    plant(model.module.get_submodule(path if path == "lm_head" else f"model.{path}"), change)
    with caplog.at_level("INFO"):
        assert make_program(model, BLOCK_SIZE) is None
    wanted = "what the embedding gives" if path == "embed_tokens" else " differs by "
    assert "off for this model: " in caplog.text
    assert wanted in caplog.text


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("kv_a_layernorm", scaled(1.001)),
        ("q_b_proj", clamped(8.0)),
        ("kv_b_proj", clamped(8.0)),
        ("kv_a_proj_with_mqa", scaled(1.01)),
    ],
)
def test_a_term_between_latents_and_heads_is_found(
    part: str, change: Change, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(make_family(tmp_path, "youtu"))
    plant(model.module.get_submodule(f"model.layers.1.self_attn.{part}"), change)
    with caplog.at_level("INFO"):
        assert make_program(model, BLOCK_SIZE) is None
    assert "layer 1 differs by " in caplog.text


def plant(part: Any, change: Change) -> None:
    """Change what a module computes, and nothing that it is recognised by."""
    kind = type(part)
    if kind is torch.nn.Linear:
        part.register_forward_hook(lambda _, given, result: change(part, lambda *_: result)(*given))
        return

    def forward(self: Any, *given: Any, **more: Any) -> Any:
        return change(self, lambda *own, **named: kind.forward(self, *own, **named))(*given, **more)

    part.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def test_positions_lie_on_both_sides_of_what_the_configuration_names(tmp_path: Path) -> None:
    config = load(make_family(tmp_path, "mistral")).module.config
    config.rope_parameters["original_max_position_embeddings"] = 777
    config.some_scale = 1234.0
    positions = set(trial.telling_positions(config, CONTEXT).tolist())
    window = config.sliding_window
    for number in (1, window, 777, 1234):
        assert {number - 1, number, number + 1} <= positions
    assert {0, CONTEXT - 2, CONTEXT - 1} <= positions
    assert len(positions) <= trial.MOST_POSITIONS


@pytest.mark.parametrize("family", ["llama_llama3", "qwen3_moe"])
def test_rounding_is_far_below_what_is_allowed(family: str, tmp_path: Path) -> None:
    """A copy is the same each time, whether its numbers were loud before or not."""
    assert KERNELS is not None
    model = load(make_family(tmp_path, family), torch.bfloat16)
    decoder = recognise(model.module, model.layers, model.dtype)
    positions = trial.telling_positions(model.module.config, CONTEXT)
    copies = [NarrowCopy(model, decoder) for _ in range(2)]
    with torch.inference_mode():
        run = trial._run(copies[0], positions)
        assert torch.equal(trial._run(copies[1], positions).result, run.result)
        original, trial.LAYER_TOLERANCE = trial.LAYER_TOLERANCE, -1.0
        try:
            found = dict(trial._deviations(KERNELS, copies[0], positions, draw=1))
        finally:
            trial.LAYER_TOLERANCE = original
        assert len(found) == len(positions) * (len(copies[0].layers) + 1)
        assert max(found.values()) < trial.LAYER_TOLERANCE / 10
        verdict = trial._compare_rounding(KERNELS, copies[1], positions[::3], torch.bfloat16)
    assert verdict.objection is None
    assert 1e-3 < verdict.rounding < 0.1


# ---- shards


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *itertools.product(["llama", "qwen3_moe", "ministral3"], ["tp2", "pp2", "tp2_pp2"]),
        ("bitnet", "pp2"),
    ],
)
def test_workers_of_one_model_agree(family: str, layout: str, tmp_path: Path) -> None:
    executor = shards(make_family(tmp_path, family), LAYOUTS[layout], BLOCK_SIZE)
    try:
        executor.allocate(20)
        programs = [worker.executor._program for worker in executor.workers]
    finally:
        executor.close()
    assert all(program is None for program in programs) == (family in ALIKE)
    assert all(program is not None for program in programs) == (family in NATIVE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_whose_experts_are_spread_is_tried_with_all_of_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    info = read_model_info(make_family(tmp_path, "qwen3_moe"))
    share = ExpertShare(assign_experts(info.num_experts, 2), 1)
    model = load_model(info, ModelConfig(), dtype=dtype, device=torch.device("cpu"), share=share)
    assert KERNELS is not None
    decoder = recognise(model.module, model.layers, dtype)
    assert trial.judge(KERNELS, model, decoder).objection is None
    assert make_program(model, BLOCK_SIZE) is not None
    held = [len(layer.gate_up_proj) for layer in model.expert_layers]
    assert held == [info.num_experts // 2] * len(held)
    assert all(getattr(layer, EXPERTS_ATTRIBUTE) is model.experts for layer in model.expert_layers)


# ---- errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("when", ["at first", "with the model's own weights"])
def test_an_error_of_the_kernels_leaves_the_model_to_torch(
    when: str,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = load(make_family(tmp_path, "llama"), dtype)
    computed = Program.forward

    def fail(self: Program, packed: Any, ids: Any, *more: Any) -> Any:
        if when == "at first" or ids.any():
            raise RuntimeError("no such operation\nand more")
        return computed(self, packed, ids, *more)

    monkeypatch.setattr(Program, "forward", fail)
    with caplog.at_level("INFO"):
        assert make_program(model, BLOCK_SIZE) is None
    assert "RuntimeError: no such operation" in caplog.text
    assert all(weight.numel() for weight in model.module.parameters())


def test_a_model_that_is_put_together_in_another_way_is_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure while parts are looked up plans the KV cache's memory without kernels."""
    model = load(make_family(tmp_path, "llama"))
    monkeypatch.setattr(make, "recognise", lambda *_: model.module.no_such_part)
    assert bytes_for_program(model, BLOCK_SIZE) == 0
    assert make_program(model, BLOCK_SIZE) is None
