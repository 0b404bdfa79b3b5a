"""Codes follow weights that are laid out in another order, or joined."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.executor.uni import UniExecutor
from engine.kernels.attention.attention import Attention
from engine.kernels.core import library
from engine.kernels.make import make_program
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.quantization import attached
from engine.model.quantization.attached import codes_of, in_a_row, reader_of, rows_of
from tests.engine.invariance.answers import ALONE
from tests.engine.invariance.answers import load as load_instance
from tests.engine.invariance.mixed import requests
from tests.engine.kernels.products.test_rounded_products import weight_of
from tests.engine.kernels.test_native_trial import load
from tests.engine.model.quantization.writers import write_quantized
from tests.engine.model.sharding.test_sharding import LAYOUTS, NUM_IN_TABLE, greedy, run, settings, shards
from tests.engine.native_families import EXPERTS, GROUPED, LATENT, WIDER
from tests.engine.tiny_models import VOCAB, save, widen
from tests.nightly import NIGHTLY
from tests.router.tiny_tokenizer import byte_level

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

BLOCK_SIZE = 16
PUBLISHED, ROUNDED = "fp8 in blocks of 32", "w8a8 per channel"
"""DeepSeek-V3's published form with smaller blocks, and one with inputs in 8 bits."""
DEEPSEEK: dict[str, Any] = (
    WIDER
    | LATENT
    | EXPERTS
    | GROUPED
    | {"n_group": 4, "topk_group": 2, "q_lora_rank": 64, "moe_intermediate_size": 64}
)
CONFIGS: dict[str, Callable[[], Any]] = {
    "latents": lambda: transformers.DeepseekV3Config(**DEEPSEEK),
    "latents, queries without": lambda: transformers.DeepseekV3Config(**DEEPSEEK | {"q_lora_rank": None}),
    "heads in another order": lambda: transformers.Glm4Config(**WIDER, head_dim=32),
    "joined projections": lambda: transformers.Phi3Config(**WIDER),
}


def make(directory: Path, kind: str, form: str) -> Path:
    """A quantised model in ``quantized``, and the same widened in ``wide``."""
    config = CONFIGS[kind]()
    model = AutoModelForCausalLM.from_config(config)
    widen(model, 0)
    write_quantized(save(model, directory / "plain"), form, directory / "quantized", directory / "wide")
    return directory


def test_rows_and_their_codes_stay_together() -> None:
    first, second = weight_of(32, 64), weight_of(48, 64, seed=1)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    joined = in_a_row([rows_of(first, slice(3, 20)), rows_of(second, order)])
    assert torch.equal(joined, torch.cat([first[3:20], second[order]]))
    codes, reader = codes_of(joined), reader_of(joined)
    assert codes is not None
    assert reader is not None
    assert reader.rounds
    assert torch.equal(codes.widened(joined.dtype), joined)
    assert codes_of(in_a_row([first, second.data])) is None


@pytest.mark.parametrize("kind", CONFIGS if NIGHTLY else ["latents", "heads in another order"])
def test_inputs_in_8_bits_are_rounded_as_torch_rounds_them(kind: str, tmp_path: Path) -> None:
    """In float32, where what is not rounded would stand out."""
    directory = make(tmp_path, kind, ROUNDED) / "quantized"
    program = make_program(load(directory), BLOCK_SIZE)
    assert program is not None
    assert all(not layer.keeps_latents for layer in attentions(program))


@pytest.mark.parametrize("kind", CONFIGS if NIGHTLY else ["joined projections"])
def test_without_their_codes_they_would_be_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make(tmp_path, kind, ROUNDED) / "quantized"
    monkeypatch.setattr(attached._Rearranged, "read", lambda _: None)
    assert make_program(load(directory), BLOCK_SIZE) is None


def attentions(program: Program) -> list[Attention]:
    return [packed.layer.mixer for packed in program.laid_out.packed.layers]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """DeepSeek-V3 as it is published, in fp8, or in another form."""
    return cache(lambda form: make(tmp_path_factory.mktemp("published"), "latents", form))


def answers(directory: Path) -> list[list[int]]:
    alone = UniExecutor(settings(directory, block_size=BLOCK_SIZE), read_model_info(directory), 1)
    alone.load(lambda _phase: None)
    params = greedy()[:NUM_IN_TABLE]
    found, _ = run(alone, directory, params, num_blocks=9, budget=24, block_size=BLOCK_SIZE)
    assert alone._program is not None
    assert all(layer.keeps_latents for layer in attentions(alone._program))
    assert (alone._program.quantized_bytes > 0) == (directory.name == "quantized")
    return found


@pytest.mark.parametrize("form", [PUBLISHED, "w4a16 groups"] if NIGHTLY else [PUBLISHED])
def test_answers_are_those_of_the_widened_weights(form: str, published: Callable[[str], Path]) -> None:
    """At one worker and at two."""
    directory = published(form)
    expected = answers(directory / "wide")
    assert answers(directory / "quantized") == expected
    executor = shards(directory / "quantized", LAYOUTS["tp2"], BLOCK_SIZE)
    try:
        params = greedy()[:NUM_IN_TABLE]
        found, _ = run(
            executor, directory / "quantized", params, num_blocks=9, budget=24, block_size=BLOCK_SIZE
        )
        programs = [worker.executor._program for worker in executor.workers]
        assert all(program is not None and program.quantized_bytes for program in programs)
        assert found == expected
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("form", "kept"),
    [(PUBLISHED, "int8"), *([(PUBLISHED, "auto"), (ROUNDED, "auto"), (ROUNDED, "int8")] if NIGHTLY else [])],
)
def test_bits_are_those_of_each_request_alone(form: str, kept: str, published: Callable[[str], Path]) -> None:
    directory = published(form) / "quantized"
    byte_level().save(str(directory / "tokenizer.json"))
    instance = load_instance(directory, kept=kept)
    submits = requests(7, vocab_size=VOCAB, count=48 if NIGHTLY else 16, longest=60, most=20)
    assert instance.executor._program is not None
    instance.check_in_company(submits, instance.answers(submits, ALONE)[0])
