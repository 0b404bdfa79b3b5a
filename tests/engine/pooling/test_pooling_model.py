"""Answers of pooling models: transformers' numbers, and the same bits alone and in any batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from coordinator.pooled_model import PoolingTask
from engine.compute.fixed_blocks import FixedBlocks, LargeBlocks
from engine.config.pooling import PoolingConfig
from engine.config.quantization import OnlineName
from engine.kernels.core import library
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.pooling.detection import as_pooling, find_pooling
from engine.pooling.pooling_model import PooledInput, PoolingModel
from engine.pooling_params import PoolingParams
from tests.engine.pooling.shapes import SHAPES, add_sentence_files, make_checkpoint

EACH_PUSH = ("bert", "roberta", "modernbert", "deberta-v2", "gemma3")
LENGTHS = (5, 33, 1, 130, 64)
LONG = (8000, 3, 700, 2049)
"""Lengths at night, of models that take so many tokens."""
PACKED = frozenset(SHAPES) - {"mpnet", "deberta-v2"}
"""Shapes whose attention goes through transformers' interface."""
JOINED = frozenset({"gte", "jina_embeddings_v3", "nomic_bert"})
"""Shapes whose files have matrices joined that their layers have apart."""


def shapes() -> list[Any]:
    """All shapes, most of them at night."""
    return [name if name in EACH_PUSH else pytest.param(name, marks=pytest.mark.nightly) for name in SHAPES]


def shapes_in_eight_bits() -> list[Any]:
    """Shapes with native layers, most of them at night."""
    names = sorted(PACKED - {"albert"} - JOINED)
    return [
        name if name in ("bert", "modernbert") else pytest.param(name, marks=pytest.mark.nightly)
        for name in names
    ]


def load(
    directory: Path, dtype: torch.dtype = torch.float32, online: OnlineName | None = None, **flags: Any
) -> PoolingModel:
    pooled = find_pooling(directory, PoolingConfig(**flags))
    return PoolingModel(as_pooling(read_model_info(directory), pooled), dtype, online=online)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    draw = np.random.default_rng(7)
    return [draw.integers(3, 128, length).tolist() for length in lengths]


def ask(model: PoolingModel, ids: Sequence[list[int]], task: str = "embed", **params: Any) -> list[Any]:
    asked = PoolingParams(PoolingTask(task), **params)
    return model.answers([PooledInput(each, asked) for each in ids])


def states_of(directory: Path, ids: list[int], **more: Any) -> torch.Tensor:
    """[tokens, width] of transformers' own computation."""
    module = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        found: torch.Tensor = module(input_ids=torch.tensor([ids]), **more).last_hidden_state[0]
    return found


def cosine(found: np.ndarray[Any, Any], wanted: torch.Tensor) -> float:
    left, right = torch.from_numpy(found).double(), wanted.double()
    return float(left @ right / left.norm() / right.norm())


def compare(directory: Path, model: PoolingModel, lengths: Sequence[int]) -> None:
    """Embeddings are those of transformers, and have the same bits alone and in two batches."""
    ids = prompts(lengths)
    together, turned = ask(model, ids), ask(model, ids[::-1])[::-1]
    for each, found, again in zip(ids, together, turned, strict=True):
        (alone,) = ask(model, [each])
        assert np.array_equal(alone, found)
        assert np.array_equal(alone, again)
        states = states_of(directory, each)
        wanted = {"cls": states[0], "last": states[-1], "mean": states.mean(dim=0)}
        assert cosine(found, wanted[model.facts.pooling]) > 1 - 1e-6
        assert abs(np.linalg.norm(found) - 1) < 1e-5


@pytest.mark.parametrize("shape", shapes())
def test_embeddings_are_those_of_transformers_alone_and_in_batches(tmp_path: Path, shape: str) -> None:
    model = load(make_checkpoint(tmp_path, shape), runner="pooling")
    assert model.packs == (shape in PACKED)
    assert (model.native is not None) == (shape in PACKED - {"albert"} and library.load() is not None)
    compare(tmp_path, model, LENGTHS)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", ["modernbert", "gte", "nomic_bert", "qwen3", "gemma3"])
def test_long_inputs_have_the_same_bits_in_any_batch(tmp_path: Path, shape: str) -> None:
    model = load(make_checkpoint(tmp_path, shape), runner="pooling")
    compare(tmp_path, model, LONG)


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_the_number_of_threads(tmp_path: Path, threads: int) -> None:
    model, before = load(make_checkpoint(tmp_path, "bert")), torch.get_num_threads()
    wanted = ask(model, prompts(LENGTHS))
    try:
        torch.set_num_threads(threads)
        found = ask(model, prompts(LENGTHS))
    finally:
        torch.set_num_threads(before)
    assert all(map(np.array_equal, wanted, found))


def test_files_of_sentence_transformers_say_how_it_pools(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "bert")
    add_sentence_files(tmp_path, "mean", normalizes=True, dense=24)
    model = load(tmp_path)
    assert (model.facts.pooling, model.facts.normalizes, model.facts.dimensions) == ("mean", True, 24)
    ids = prompts([9, 40])
    weights = load_file(tmp_path / "2_Dense" / "model.safetensors")
    for each, found in zip(ids, ask(model, ids), strict=True):
        mean = states_of(tmp_path, each).mean(dim=0)
        wanted = torch.tanh(weights["linear.weight"] @ mean + weights["linear.bias"])
        assert cosine(found, wanted) > 1 - 1e-6


def test_segments_dimensions_and_lengths_follow_the_request(tmp_path: Path) -> None:
    config = {"matryoshka_dimensions": [16, 32]}
    model = load(make_checkpoint(tmp_path, "bert", **config))
    (ids,) = prompts([20])
    kinds = bytes(12) + bytes([1]) * 8
    (found,) = ask(model, [ids], token_type_ids=kinds, normalize=False)
    states = states_of(tmp_path, ids, token_type_ids=torch.tensor([list(kinds)]))
    assert np.allclose(found, states[0], atol=1e-5)
    (cut,) = ask(model, [ids], token_type_ids=kinds, dimensions=16)
    assert cut.shape == (16,)
    assert np.allclose(cut, found[:16] / np.linalg.norm(found[:16]), atol=1e-6)
    assert model.facts.cuts_to(32)
    assert not model.facts.cuts_to(20)
    (tokens,) = ask(model, [ids], "token_embed", token_type_ids=kinds, normalize=False)
    assert np.allclose(tokens, states, atol=1e-5)


CLASSIFIERS = ("bert", "modernbert", "qwen3")


@pytest.mark.parametrize(
    "shape",
    [name if name in CLASSIFIERS else pytest.param(name, marks=pytest.mark.nightly) for name in SHAPES],
)
@pytest.mark.parametrize("labels", [1, 3])
def test_classes_and_scores_are_those_of_transformers(tmp_path: Path, shape: str, labels: int) -> None:
    make_checkpoint(tmp_path, shape, "ForSequenceClassification", num_labels=labels)
    model = load(tmp_path)
    task = "score" if labels == 1 else "classify"
    assert model.facts.tasks[0] == task
    ids = prompts([6, 31, 70])
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    raw, shown = ask(model, ids, task, activation=False), ask(model, ids, task)
    for each, logits, found in zip(ids, raw, shown, strict=True):
        with torch.no_grad():
            wanted = whole(input_ids=torch.tensor([each])).logits[0]
        assert logits.shape == (labels,)
        assert np.allclose(logits, wanted, atol=2e-5)
        assert np.allclose(found, wanted.sigmoid() if labels == 1 else wanted.softmax(-1), atol=1e-5)
        (alone,) = ask(model, [each], task)
        assert np.array_equal(alone, found)


def test_classes_of_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "roberta", "ForTokenClassification", num_labels=5)
    model = load(tmp_path)
    assert model.facts.tasks == (PoolingTask.TOKEN_CLASSIFY,)
    whole = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    ids = prompts([12, 3])
    for each, found in zip(ids, ask(model, ids, "token_classify"), strict=True):
        with torch.no_grad():
            wanted = whole(input_ids=torch.tensor([each])).logits[0].softmax(-1)
        assert np.allclose(found, wanted, atol=1e-5)


def test_a_reranker_that_answers_yes_or_no_gives_the_share_of_yes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", "ForCausalLM")
    vocabulary = {"no": 17, "yes": 99, "[UNK]": 0}
    Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    model = load(tmp_path, convert="classify")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = prompts([12, 3])
    for each, found in zip(ids, ask(model, ids, "score"), strict=True):
        with torch.no_grad():
            logits = whole(input_ids=torch.tensor([each])).logits[0, -1]
        assert np.allclose(found, logits[[17, 99]].softmax(-1)[1:], atol=1e-5)


def test_a_head_that_the_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "bert")
    with pytest.raises(CheckpointError, match=r"lacks weights: classifier.*--convert classify"):
        load(tmp_path, convert="classify")


def test_a_decoder_trained_as_an_encoder_sees_both_sides(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    (ids,) = prompts([30])
    config = json.loads((tmp_path / "config.json").read_text())
    (causal,) = ask(load(tmp_path), [ids], "token_embed")
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    (whole,) = ask(load(tmp_path), [ids], "token_embed")
    assert not np.allclose(causal[0], whole[0], atol=1e-3)


def test_bfloat16_is_near_float32_and_keeps_its_bits(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "bert"), torch.bfloat16)
    ids = prompts(LENGTHS)
    for each, found in zip(ids, ask(model, ids), strict=True):
        assert np.array_equal(ask(model, [each])[0], found)
        assert cosine(found, states_of(tmp_path, each)[0]) > 1 - 1e-3


def test_large_blocks_give_the_bits_of_usual_ones_or_are_not_used() -> None:
    draw = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        for outputs, inputs in ((96, 64), (64, 160), (33, 64)):
            weight = torch.randn(outputs, inputs, generator=draw).to(dtype)
            bias = torch.randn(outputs, generator=draw).to(dtype)
            rows = torch.randn(300, inputs, generator=draw).to(dtype)
            with FixedBlocks(), torch.inference_mode():
                usual = torch.nn.functional.linear(rows, weight, bias)
            with FixedBlocks(LargeBlocks({(outputs, inputs)})), torch.inference_mode():
                assert torch.equal(torch.nn.functional.linear(rows, weight, bias), usual)
                assert torch.equal(torch.nn.functional.linear(rows[5:7], weight, bias), usual[5:7])


@pytest.mark.skipif(library.load() is None, reason="needs native kernels")
@pytest.mark.parametrize("kind", ["int8", "int8_per_channel_weight_only"])
@pytest.mark.parametrize("shape", shapes_in_eight_bits())
def test_eight_bits_are_near_float32_and_keep_their_bits(tmp_path: Path, shape: str, kind: Any) -> None:
    directory = make_checkpoint(tmp_path, shape)
    model = load(directory, runner="pooling")
    rounded = load(directory, online=kind, runner="pooling")
    assert rounded.native is not None
    assert rounded.native.weight_bytes < model.native.weight_bytes / 2  # type: ignore[union-attr]
    ids = prompts(LENGTHS)
    wanted, found = ask(model, ids), ask(rounded, ids)
    for each, exact, near in zip(ids, wanted, found, strict=True):
        assert np.array_equal(ask(rounded, [each])[0], near)
        assert not np.array_equal(exact, near)
        assert cosine(near, torch.from_numpy(exact)) > 1 - 2e-3


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("gte", "does not take apart"),
        pytest.param("jina_embeddings_v3", "does not take apart", marks=pytest.mark.nightly),
        pytest.param("nomic_bert", "does not take apart", marks=pytest.mark.nightly),
        pytest.param("albert", "no tensor is", marks=pytest.mark.nightly),
        pytest.param("mpnet", "needs native layers", marks=pytest.mark.nightly),
        ("deberta-v2", "needs native layers"),
    ],
)
def test_eight_bits_without_kernels_for_them_are_refused(tmp_path: Path, shape: str, reason: str) -> None:
    directory = make_checkpoint(tmp_path, shape)
    with pytest.raises(CheckpointError, match=reason):
        load(directory, online="int8", runner="pooling")
