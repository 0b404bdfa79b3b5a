"""Reading models: refusals with their messages, and the forms that weights may have."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, core_model_loading

from engine.attention.base import WHOLE_CONTEXT, KeyReach, LayerShape
from engine.config import ModelConfig
from engine.lifecycle.ended import InstanceEnded
from engine.model import weights
from engine.model.checkpoint import CheckpointError, ModelInfo, read_model_info
from engine.model.model_class import class_of
from engine.model.module_reading import ModuleReader
from engine.model.probe import OTHER, _check_all_layers_attend, _reach
from engine.model.weights import LoadedModel, load_model
from engine.sampling import SamplingParams
from parallel.communicators.base import CollectiveError
from tests.engine.compute.test_runner import GREEDY, make_driver, make_prompts
from tests.engine.driver import Driver
from tests.engine.tiny_models import ALTERNATING, COMMON, FAMILIES, WINDOW, make_tiny_model, widen

CPU = torch.device("cpu")


def load(directory: Path, **settings: Any) -> LoadedModel:
    info = read_model_info(directory)
    return load_model(info, ModelConfig(model=str(directory), **settings), dtype=torch.float32, device=CPU)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def greedy_ids(model: LoadedModel, num_new: int = 6, length: int = 29) -> list[int]:
    driver = make_driver(model)
    request = driver.add(make_prompts((length,))[0], GREEDY)
    driver.generate([request], num_new, chunk=11)
    return request.output_ids


def test_layer_shapes(tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path, "gemma2"))
    sliding, full = LayerShape(2, 16, 16, WINDOW), LayerShape(2, 16, 16, None)
    assert model.layers == (sliding, full, sliding, full)
    assert model.kv_bytes_per_token() == 4 * 2 * (16 + 16) * 4
    assert model.kv_bytes_per_token("int8") == 4 * 2 * (16 + 16 + 2 + 2)
    assert model.vocab_size == COMMON["vocab_size"]
    assert model.weight_bytes == 4 * model.num_parameters
    latent = load(make_tiny_model(tmp_path / "latent", "deepseek_v3"))
    assert latent.layers == (LayerShape(4, 24, 20, None),) * 3


def test_reach_of_a_mask_function() -> None:
    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    assert _reach(causal, 5000) == WHOLE_CONTEXT
    assert _reach(lambda b, h, q, k: causal(b, h, q, k) & (k > q - 100), 5000) == KeyReach(window=100)
    assert _reach(lambda b, h, q, k: causal(b, h, q, k) & (k > q - 1), 5000) == KeyReach(window=1)
    for chunk in (5, 64, 2500, 4999):
        chunked = _reach(lambda b, h, q, k, c=chunk: causal(b, h, q, k) & (q // c == k // c), 5000)
        assert chunked == KeyReach(chunk=chunk)
    assert _reach(lambda b, h, q, k: causal(b, h, q, k) & ((q + 9) // 64 == (k + 9) // 64), 5000) == OTHER
    assert _reach(lambda b, h, q, k: k <= q + 1, 5000) == OTHER
    assert _reach(lambda b, h, q, k: causal(b, h, q, k) & (k % 2 == 0), 5000) == OTHER


def test_a_layer_that_does_not_attend_is_named() -> None:
    layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in range(3)])
    model = torch.nn.Sequential(layers, torch.nn.ModuleList([torch.nn.Linear(1, 1)]))
    attending = {id(layer[0]) for layer in layers}
    _check_all_layers_attend(model, "Some", attending)
    with pytest.raises(CheckpointError, match=r"1 of 3 layers did not .* first 0\.1 \(Sequential\)"):
        _check_all_layers_attend(model, "Some", attending - {id(layers[1][0])})


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown type": (
        {"model_type": "llama9", "architectures": ["Llama9ForCausalLM"]},
        "has no model type 'llama9'",
    ),
    "no language model": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "is not a causal language model",
    ),
    "quantised": (
        {"quantization_config": {"quant_method": "quark"}},
        "quantised by quark, which are not built",
    ),
    "no number": (
        {"hidden_size": "big"},
        "cannot read its config.json.*'hidden_size' expected int, got str",
    ),
    "no heads": ({"num_attention_heads": 0}, "LlamaForCausalLM: "),
    "no layers": ({"num_hidden_layers": -1}, "LlamaForCausalLM: "),
    "another size": (
        {"intermediate_size": 100},
        r"tensor\(s\) of another shape than its config.json says: .* is \[",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_config(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    change_config(make_tiny_model(tmp_path, "llama"), **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def small(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in COMMON.items() if key != "attention_dropout"} | changes


def counting(**changes: Any) -> Any:
    """Queries of its fourth layer grow with the position within a call of the layer."""
    return transformers.Llama4TextConfig(
        **small(num_hidden_layers=4, attention_chunk_size=8192, layer_types=["full_attention"] * 4) | changes
    )


REFUSED_ARCHITECTURES: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder-decoder": (
        lambda: transformers.T5Config(vocab_size=384, d_model=64),
        "T5ForConditionalGeneration is not served: transformers has no causal language model",
    ),
    "a state on the module": (
        lambda: transformers.RecurrentGemmaConfig(**small()),
        "does not go through transformers' attention interface",
    ),
    "bidirectional": (
        lambda: transformers.BertConfig(**small(num_attention_heads=4)),
        "bert.encoder.layer.0.attention.self uses a mask that is neither causal",
    ),
    "own attention": (
        lambda: transformers.CpmAntConfig(hidden_size=64, num_attention_heads=4, dim_head=16, dim_ff=96),
        "does not go through transformers' attention interface",
    ),
}


@pytest.mark.parametrize(
    "changes", [{"attn_temperature_tuning": False}, {"no_rope_layers": [1] * 4}], ids=["one scale", "rotary"]
)
def test_a_layer_that_could_count_and_does_not_is_served(changes: dict[str, Any], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        counting(intermediate_size_mlp=96, num_local_experts=2, head_dim=16, **changes)
    )
    model.save_pretrained(tmp_path)
    assert len(load(tmp_path).layers) == 4


def test_a_layer_that_counts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Llama 4's would, if its queries were not scaled by position instead."""
    monkeypatch.setattr("engine.model.weights.scale_by_position", lambda module: None)
    transformers.AutoModelForCausalLM.from_config(
        counting(intermediate_size_mlp=96, num_local_experts=2, head_dim=16)
    ).save_pretrained(tmp_path)
    message = r"model.layers.3.self_attn counts the tokens of a call instead of using position_ids"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_choice_for_other_heads_is_refused(tmp_path: Path) -> None:
    config = transformers.MiniMaxM3VLTextConfig(
        **small(num_key_value_heads=4, head_dim=16, rotary_dim=8, layer_types=["minimax_m3_sparse"] * 2)
        | {"index_n_heads": 2, "index_head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    message = r"model.layers.0.self_attn chooses keys 2 times for 4 KV heads, which is not built"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_an_indexer_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.attention.indexers.TOKEN_PARTS", ("other_part",))
    config = transformers.DeepseekV32Config(**small(num_key_value_heads=4, index_topk=16, q_lora_rank=32))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    message = "DeepseekV32ForCausalLM chooses keys by DeepseekV32Indexer, which is not built"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("case", REFUSED_ARCHITECTURES)
def test_refused_by_architecture(case: str, tmp_path: Path) -> None:
    """With dummy weights, so that large default sizes need not be written down."""
    make_config, message = REFUSED_ARCHITECTURES[case]
    config = make_config()
    config.save_pretrained(tmp_path)
    architecture = {"t5": "T5ForConditionalGeneration", "bert": "BertLMHeadModel"}.get(config.model_type)
    info = ModelInfo(
        directory=str(tmp_path),
        architecture=architecture or re.sub("(Text)?Config$", "ForCausalLM", type(config).__name__),
        model_type=config.model_type,
        vocab_size=384,
        context_length=512,
        dtype="float32",
        eos_token_ids=(),
        num_experts=0,
    )
    with pytest.raises(CheckpointError, match=message):
        load_model(info, ModelConfig(load_format="dummy"), dtype=torch.float32, device=CPU)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    shutil.copytree(tmp_path, missing := tmp_path / "missing")
    change_tensors(missing, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor.*: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(missing)
    shutil.copytree(tmp_path, unknown := tmp_path / "unknown", ignore=shutil.ignore_patterns("missing"))
    change_tensors(unknown, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.ones(2)}))
    with pytest.raises(
        CheckpointError, match=r"has 1 tensor.* does not know: model\.layers\.0\.extra\.weight"
    ):
        load(unknown)
    shutil.copytree(
        tmp_path, wrong := tmp_path / "wrong", ignore=shutil.ignore_patterns("missing", "unknown")
    )
    change_tensors(wrong, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[3\], not \["):
        load(wrong)


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    change_tensors(tmp_path, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match="its output is not finite"):
        load(tmp_path)


def test_tokens_mixed_outside_attention_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a convolution or a token shift would: nothing in the config says so."""
    directory = make_tiny_model(tmp_path, "llama")
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    plain = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: plain(self, x + x.roll(1, dims=1)))
    with pytest.raises(CheckpointError, match="differs from transformers' own"):
        load(directory)


def test_a_stop_while_weights_are_read_is_no_fault_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal raises it inside of transformers, and nothing is read again."""
    directory = make_tiny_model(tmp_path, "llama")
    calls: list[str] = []

    def stop(*_args: Any, **_options: Any) -> None:
        calls.append("from_pretrained")
        raise InstanceEnded(0, "told to stop")

    monkeypatch.setattr("engine.model.weights.run_deferred", lambda: True)
    for told in (transformers.AutoConfig, transformers.LlamaForCausalLM):
        with monkeypatch.context() as patch:
            patch.setattr(told, "from_pretrained", stop)
            with pytest.raises(InstanceEnded, match="told to stop"):
                load(directory)
    assert calls == ["from_pretrained"] * 2


def test_the_end_of_another_worker_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path, "llama")

    def fail(*_args: Any) -> None:
        raise CollectiveError("rank 1 has ended", 1)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", fail)
    with pytest.raises(CollectiveError, match="rank 1 has ended"):
        load(directory)


def test_weights_stay_in_their_file_where_no_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(4, 4).requires_grad_(False)
    mapped = torch.arange(18.0)[2:].view(4, 4)
    module.weight.data = mapped
    with monkeypatch.context() as busy:
        busy.setattr(weights, "available_memory", lambda: 0)
        assert not weights.align(module)
        assert weights.bytes_to_align(module) == 0  # none is kept for what will not be taken
    assert module.weight.data_ptr() == mapped.data_ptr()
    with monkeypatch.context() as busy:
        busy.setattr(weights, "available_memory", lambda: 1000)
        assert weights.bytes_to_align(module, sharers=2) == mapped.nbytes
        assert not weights.bytes_to_align(module, sharers=15)
        assert not weights.align(module, promised=900)
    assert weights.align(module)
    assert module.weight.data_ptr() % 64 == 0
    assert torch.equal(module.weight, mapped)
    assert weights.bytes_to_align(module) == 0


def misaligned(num_bytes: int, last: float) -> torch.nn.Module:
    """Weights as of a mapped file; no sample of its bytes has ``last``."""
    module = torch.nn.Linear(1, num_bytes // 4, bias=False).requires_grad_(False)
    numbers = torch.arange(num_bytes / 4 + 2)
    numbers[num_bytes // 12] = last
    module.weight.data = numbers[2:].view(-1, 1)
    return module


def test_weights_of_another_process_are_taken_before_the_cache_is_sized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So they stay where that one ends, and those that only seem equal need memory."""
    num_bytes = 30_000
    holder, module, other = (misaligned(num_bytes, last) for last in (1.0, 1.0, 2.0))
    assert weights.align(holder)
    monkeypatch.setattr(weights, "available_memory", lambda: num_bytes // 2)
    assert weights.bytes_to_align(module) == 0
    assert not weights.align(other)
    holder.weight.data = torch.zeros(1)  # nobody else has it any more
    assert weights.align(module)
    assert module.weight.data_ptr() % 64 == 0
    assert torch.equal(module.weight, misaligned(num_bytes, 1.0).weight)
    monkeypatch.setattr(weights, "available_memory", lambda: num_bytes * 2)
    assert weights.bytes_to_align(other) == num_bytes
    assert weights.align(other)
    assert torch.equal(other.weight, misaligned(num_bytes, 2.0).weight)


def test_old_buffers_in_a_checkpoint_are_ignored(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    expected = greedy_ids(load(tmp_path))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert greedy_ids(load(tmp_path)) == expected


def test_weights_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    expected = greedy_ids(load(make_tiny_model(tmp_path, "llama")))
    shutil.copytree(tmp_path, inside := tmp_path / "inside")
    name = "layers.2.eh_proj.weight"  # behind its two layers
    for further in ("mtp.fc.weight", "model.mtp.norm.weight", f"model.{name}", "mtp_layers.0.norm.weight"):
        change_tensors(tmp_path, lambda tensors, name=further: tensors.update({name: torch.ones(2)}))
    assert greedy_ids(load(tmp_path)) == expected
    change_tensors(inside, lambda tensors: tensors.update({"model.layers.1.norm.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"has 1 tensor.* does not know: model\.layers\.1\.norm"):
        load(inside)


def test_dummy_weights_are_the_same_everywhere(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3_moe")
    first, second = load(tmp_path, load_format="dummy"), load(tmp_path, load_format="dummy")
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other)
    assert first.num_parameters == load(tmp_path).num_parameters
    (tmp_path / "model.safetensors").unlink()
    info = read_model_info(tmp_path, weights=False)
    third = load_model(info, ModelConfig(load_format="dummy"), dtype=torch.float32, device=CPU)
    assert third.num_parameters == first.num_parameters, "there is nothing to read"


def test_dummy_weights_are_drawn_where_they_are_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the host first: the model arrives with nothing left to be moved."""
    info = read_model_info(make_tiny_model(tmp_path, "qwen3_moe"))
    made: list[torch.device] = []
    from_config = transformers.Qwen3MoeForCausalLM._from_config

    def note(*args: Any, **kwargs: Any) -> Any:
        model = from_config(*args, **kwargs)
        made.extend(each.device for each in (*model.parameters(), *model.buffers()))
        raise RuntimeError("far enough")

    monkeypatch.setattr(transformers.Qwen3MoeForCausalLM, "_from_config", note)
    for device in (CPU, torch.device("meta")):
        made.clear()
        with pytest.raises(CheckpointError, match="far enough"):
            load_model(info, ModelConfig(load_format="dummy"), dtype=torch.float32, device=device)
        assert set(made) == {device}


VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}


def larger(kind: str, text: dict[str, Any], vision: dict[str, Any] = VISION) -> Any:
    """The configuration of a model with other modalities, of transformers' classes ``kind``."""
    return getattr(transformers, f"{kind}Config")(
        text_config={**small(), **text}, vision_config=vision, tie_word_embeddings=False
    )


def positions_of(*sections: int) -> dict[str, Any]:
    """Rotary parameters that split a head among time, height and width."""
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}


def vision_of(**more: Any) -> dict[str, Any]:
    return VISION | {"out_hidden_size": COMMON["hidden_size"], "num_position_embeddings": 16} | more


DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""Layers with a recurrent state beside one that attends, as in Qwen3.5."""

LARGER_MODELS: dict[str, Callable[[], Any]] = {
    "Gemma3": lambda: transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **small(
                num_hidden_layers=4,
                head_dim=16,
                query_pre_attn_scalar=16,
                sliding_window=WINDOW,
                layer_types=ALTERNATING,
            )
        ),
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4,
        tie_word_embeddings=True,
    ),
    "Llama4": lambda: larger(
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "attention_chunk_size": 8,
            "floor_scale": 8,
            "attn_scale": 0.5,
        },
        VISION
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "MiniMaxM3Sparse": lambda: transformers.MiniMaxM3VLConfig(
        text_config={
            **small(num_hidden_layers=4),
            "sparse_attention_config": {  # as published, instead of layer_types
                "sparse_attention_freq": [0, 1, 1, 1],
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 2,
                "sparse_local_block": 1,
            },
            "moe_layer_freq": [0, 1, 1, 1],
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 48,
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        projector_hidden_size=32,
        tie_word_embeddings=False,
    ),
    "Qwen2VL": lambda: larger(
        "Qwen2VL",
        {"rope_parameters": positions_of(2, 3, 3)},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    ),
    "Qwen2_5_VL": lambda: larger(
        "Qwen2_5_VL",
        {"rope_parameters": positions_of(2, 3, 3)},
        vision_of(fullatt_block_indexes=[0]),
    ),
    "Qwen3VL": lambda: larger(
        "Qwen3VL",
        {"rope_parameters": positions_of(4, 2, 2), "head_dim": 16},
        vision_of(deepstack_visual_indexes=[0]),
    ),
    "Qwen3VLMoe": lambda: larger(
        "Qwen3VLMoe",
        {
            "rope_parameters": positions_of(4, 2, 2),
            "head_dim": 16,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        vision_of(deepstack_visual_indexes=[0]),
    ),
    "Qwen3_5": lambda: larger("Qwen3_5", DELTA, vision_of()),
    "Qwen3_5Moe": lambda: larger(
        "Qwen3_5Moe",
        DELTA
        | {
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        vision_of(),
    ),
    "Glm4v": lambda: larger(
        "Glm4v",
        {"rope_parameters": positions_of(1, 1, 2) | {"partial_rotary_factor": 0.5}},
        vision_of(image_size=28),
    ),
    "Glm4vMoe": lambda: larger(
        "Glm4vMoe",
        {
            "rope_parameters": positions_of(1, 1, 2) | {"partial_rotary_factor": 0.5},
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
        vision_of(image_size=28),
    ),
}
"""Larger models by the name of their classes, and their configurations."""


def make_larger(kind: str, directory: Path) -> Any:
    """A larger model, saved and in memory."""
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(LARGER_MODELS[kind]()).eval()
    widen(whole, 0)
    whole.save_pretrained(directory)
    return whole


@pytest.mark.parametrize("kind", LARGER_MODELS)
def test_the_language_part_of_a_larger_model(kind: str, tmp_path: Path) -> None:
    whole = make_larger(kind, tmp_path)
    model = load(tmp_path)
    names = kind, f"{kind}Text", kind.replace("Sparse", "VL")
    assert type(model.module).__name__ in [f"{name}ForCausalLM" for name in names]
    prompt = make_prompts((29,))[0]
    driver = make_driver(model)
    request = driver.add(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    driver.generate([request], 1)
    types = {"token_type_ids": torch.zeros(1, 29, dtype=torch.int64)} if kind == "Gemma3" else {}
    with torch.inference_mode():
        logits = whole(torch.tensor([prompt]), **types).logits[0]
    expected = logits.log_softmax(-1)[torch.arange(28), prompt[1:]]
    assert [each.logprob for each in request.prompt_logprobs] == pytest.approx(expected.tolist(), abs=1e-3)


def test_a_language_part_under_the_names_that_it_was_published_with(tmp_path: Path) -> None:
    """Qwen2-VL has visual.* and model.layers.*, where transformers saves model.visual.* and others."""
    make_larger("Qwen2VL", tmp_path)
    expected = greedy_ids(load(tmp_path))

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            old = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
            tensors[old] = tensors.pop(name)
        assert "model.layers.0.self_attn.q_proj.weight" in tensors
        assert any(name.startswith("visual.") for name in tensors)

    change_tensors(tmp_path, rename)
    assert greedy_ids(load(tmp_path)) == expected


def test_a_hybrid_family_whose_layers_all_attend_is_served(tmp_path: Path) -> None:
    """As Granite 4.0 micro, 350m and 1b, which have none of the class's recurrent layers."""
    config = transformers.GraniteMoeHybridConfig(
        **COMMON,
        layer_types=["attention"] * 2,
        position_embedding_type="rope",
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=96,
        mamba_n_heads=4,
        mamba_d_head=32,
    )
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    widen(whole, 0)
    whole.save_pretrained(tmp_path)
    prompt = make_prompts((29,))[0]
    with torch.inference_mode():
        found = whole.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert greedy_ids(load(tmp_path)) == found[0, 29:].tolist()
    change_config(tmp_path, layer_types=["mamba", "attention"])
    with pytest.raises(CheckpointError, match=r"lacks 8 tensor"):  # those of such layers
        load(tmp_path)


OTHER_FILES: dict[str, dict[str, str]] = {
    "two without an index": {
        "embed": "model-00001-of-00002.safetensors",
        "": "model-00002-of-00002.safetensors",
    },
    "two of any name": {"layers.0": "first.safetensors", "": "second.safetensors"},
    "one of another name": {"": "weights.safetensors"},
    "beside Mistral's own layout": {"": "weights.safetensors", "nothing": "consolidated.safetensors"},
}
"""Files by a part of the names of the tensors that they hold."""


def move_weights(directory: Path, files: dict[str, str]) -> None:
    """Put the tensors of model.safetensors into files of other names."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    for part, file in files.items():
        names = [name for name in tensors if part in name]
        held = {name: tensors.pop(name) for name in names} or {"tok_embeddings.weight": torch.ones(2)}
        save_file(held, directory / file, metadata={"format": "pt"})


@pytest.mark.parametrize("case", OTHER_FILES)
def test_weights_in_files_that_transformers_does_not_find(case: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3_moe")
    expected = greedy_ids(load(tmp_path))
    move_weights(tmp_path, OTHER_FILES[case])
    assert greedy_ids(load(tmp_path)) == expected


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    shutil.copy(tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"in both one\.safetensors and two\.safetensors"):
        load(tmp_path)


OWN_CODE = """raise RuntimeError("the checkpoint's own code was run")"""


def test_code_of_a_checkpoint_is_not_run_where_transformers_has_the_family(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    expected = greedy_ids(load(tmp_path))
    for name in ("configuration_own", "modeling_own"):
        (tmp_path / f"{name}.py").write_text(OWN_CODE)
    auto_map = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    change_config(tmp_path, auto_map=auto_map)
    model = load(tmp_path, trust_remote_code=True)
    assert type(model.module) is transformers.LlamaForCausalLM
    assert greedy_ids(model) == expected


def longrope_model(directory: Path) -> Path:
    config = transformers.Phi3Config(
        **small(
            max_position_embeddings=256,
            original_max_position_embeddings=32,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [3.0] * 8,
                "original_max_position_embeddings": 32,
            },
        )
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    widen(model, 0)
    model.save_pretrained(directory)
    return directory


def long_neighbour(driver: Driver) -> None:
    request = driver.add(make_prompts((60,), seed=9)[0], GREEDY, slot=5)
    driver.generate([request], 1)


@pytest.mark.parametrize("max_model_len", [None, 32])
def test_length_dependent_rope_is_fixed(max_model_len: int | None, tmp_path: Path) -> None:
    """A request's tokens do not depend on a long request in its batch.

    They depend neither on one now nor on one before.
    """
    directory = longrope_model(tmp_path)
    model = load(directory, max_model_len=max_model_len)
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    prompt = make_prompts((20,))[0]
    padding = [3] * 40 if max_model_len is None else []  # as long as what is served: long factors
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + padding])).logits[0, 19]
    for neighbour in (False, True):
        driver = make_driver(model)
        request = driver.add(prompt, GREEDY)
        if neighbour:
            long_neighbour(driver)
        driver.generate([request], 1)
        assert request.logprobs[0].top_logprobs == pytest.approx(
            logits.log_softmax(-1).topk(4).values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_positions_beyond_the_trained_ones_are_served(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 16
    directory = make_tiny_model(tmp_path, "llama", max_position_embeddings=16, rope_parameters=scaling)
    model = load(directory)
    assert read_model_info(directory).context_length == 64
    prompt = make_prompts((64,))[0]
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0, -1]
    driver = make_driver(model)
    request = driver.add(prompt, GREEDY)
    driver.generate([request], 1, chunk=11)
    expected = logits.log_softmax(-1).topk(4).values.tolist()
    assert request.logprobs[0].top_logprobs == pytest.approx(expected, abs=1e-4)


def test_code_from_the_checkpoint_runs_only_when_trusted(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    expected = greedy_ids(load(tmp_path))
    (tmp_path / "custom.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class CustomConfig(LlamaConfig):\n    model_type = 'custom_llama'\n"
        "class CustomForCausalLM(LlamaForCausalLM):\n    config_class = CustomConfig\n"
    )
    change_config(
        tmp_path,
        model_type="custom_llama",
        architectures=["CustomForCausalLM"],
        auto_map={"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomForCausalLM"},
    )
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load(tmp_path)
    model = load(tmp_path, trust_remote_code=True)
    assert type(model.module).__name__ == "CustomForCausalLM"
    assert greedy_ids(model) == expected


def test_every_tiny_family_says_what_it_is(tmp_path: Path) -> None:
    for family in FAMILIES:
        info = read_model_info(make_tiny_model(tmp_path / family, family))
        assert info.architecture.endswith("ForCausalLM")
        assert info.vocab_size == COMMON["vocab_size"]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_go_to_another_device_one_by_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never all of them in the host's memory, and without the package accelerate."""
    directory = make_tiny_model(tmp_path, family)
    info = read_model_info(directory)
    meta = torch.device("meta")
    for module_of in [
        each for each in list(sys.modules.values()) if hasattr(each, "is_accelerate_available")
    ]:
        monkeypatch.setattr(module_of, "is_accelerate_available", lambda *_: False)  # peft brings it along
    asked: list[torch.device] = []
    materialize = core_model_loading._materialize_copy

    def note(tensor: Any, device: Any = None, dtype: Any = None) -> torch.Tensor:
        asked.append(torch.device(device))
        return materialize(tensor, device, dtype)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", note)
    settings = ModelConfig(model=str(directory))
    module = ModuleReader(info, settings, *class_of(info, settings), torch.float32).read(meta, None)
    assert len(asked) >= len(load_file(directory / "model.safetensors"))
    assert set(asked) == {meta}
    assert {parameter.device for parameter in module.parameters()} == {meta}
