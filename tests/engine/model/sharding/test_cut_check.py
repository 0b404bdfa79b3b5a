"""Refusals of cut models that compute something else than their uncut layers.

Mistakes are planted in the layers that are cut, in the stages and in the ends of the model; the workers are
threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig, ModelConfig
from engine.model import weights
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.model.module_reading import ModuleReader
from engine.model.sharding import cut_check, shard, uncut
from engine.sampling import SamplingParams
from parallel import tensor_plan
from parallel.tensor_parallel import (
    RowParallelLinear,
    SummedExperts,
    VocabularyParallel,
)
from tests.engine.compute.test_exactness import prompts
from tests.engine.model.sharding.test_sharding import LAYOUTS, run, shards
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import COMMON, make_tiny_model, widen

LENGTH = 6
NUM_PROMPTS = 4

ODD_FAMILIES: dict[str, Callable[[], Any]] = {
    "longcat_flash": lambda: transformers.LongcatFlashConfig(
        **{name: value for name, value in COMMON.items() if name != "num_hidden_layers"}
        | {"num_key_value_heads": 4},
        num_layers=2,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=48,
        n_routed_experts=8,
        zero_expert_num=4,
        moe_topk=2,
        q_lora_rank=32,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=20,
    ),
    "nanochat": lambda: transformers.NanoChatConfig(**COMMON | {"num_hidden_layers": 4}),
}
"""Experts that give back their input.

A final norm that also stands before the first layer.
"""


def odd_model(directory: Path, family: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(ODD_FAMILIES[family](), dtype=torch.float32)
    widen(model, 0)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2_pp2"])
@pytest.mark.parametrize("family", sorted(ODD_FAMILIES))
def test_families_that_were_cut_wrong_say_what_transformers_says(
    family: str, layout: str, tmp_path: Path
) -> None:
    model = odd_model(tmp_path, family)
    expected = []
    for prompt in prompts()[:NUM_PROMPTS]:
        ids = torch.tensor([prompt])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH,
            do_sample=False, eos_token_id=None, pad_token_id=2)  # fmt: skip
        expected.append(answer[0, len(prompt) :].tolist())
    executor = shards(tmp_path, LAYOUTS[layout])
    params = [SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)] * NUM_PROMPTS
    outputs, _ = run(executor, tmp_path, params, num_blocks=100, budget=64)
    executor.close()
    assert outputs == expected


# ---- planted mistakes


def refusal(directory: Path, layout: str, dtype: str = "float32") -> str:
    config = EngineConfig(model=ModelConfig(model=str(directory), dtype=dtype))
    shape = LAYOUTS[layout]
    executor = ThreadedShards(config, read_model_info(directory), tp=shape.tp, pp=shape.pp)
    try:
        with pytest.raises(CheckpointError) as caught:
            executor.load(lambda _phase: None)
    finally:
        executor.close()
    return str(caught.value)


def doubled(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up the outputs of this kind of module once more."""
    own = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._ranks.all_reduce(own(self, *args, **kwargs)) / (self._ranks.size * 0.5)

    monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [RowParallelLinear, SummedExperts], ids=lambda kind: kind.__name__)
def test_a_planted_double_sum_is_found(
    kind: Any, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled(kind, monkeypatch)
    directory = make_tiny_model(tmp_path, "qwen3_moe", dtype=getattr(torch, dtype))
    message = refusal(directory, "tp2", dtype)
    assert "layer 0 differs by" in message
    assert "It would be served wrong: use -tp 1" in message


def test_identities_that_each_rank_adds_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd_model(tmp_path, "longcat_flash")
    monkeypatch.setattr(tensor_plan, "FirstRankOnly", lambda _ranks: torch.nn.Identity())
    assert "layer 0 differs by" in refusal(tmp_path, "tp2")


def test_a_planted_missed_norm_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final norm on the last stage only, though layer 0 needs it, too."""
    odd_model(tmp_path, "nanochat")
    own = shard._keep_stage

    def keep_stage(model: Any, place: Any, layers: range) -> None:
        own(model, place, layers)
        if not place.is_last:
            model.base_model.norm = shard.PassThrough()

    monkeypatch.setattr(shard, "_keep_stage", keep_stage)
    message = refusal(tmp_path, "pp2")
    assert "cut for worker PP0_TP0" in message
    assert "the input of layer 0 differs by" in message
    assert message.endswith("use -pp 1")


@pytest.mark.parametrize("norm", ["input_layernorm", "self_attn.k_norm", "post_attention_layernorm"])
def test_a_norm_that_is_missed_inside_of_a_layer_is_found(
    norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path, "qwen3", layers=3)
    own = shard._cut

    def cut(model: Any, sharded: Any) -> None:
        own(model, sharded)
        parent, _, name = f"layers.2.{norm}".rpartition(".")
        setattr(model.base_model.get_submodule(parent), name, shard.PassThrough())

    monkeypatch.setattr(shard, "_cut", cut)
    monkeypatch.setattr(ModuleReader, "_check_report", lambda *_: None)  # its weight is left over
    assert "layer 2 differs by" in refusal(directory, "tp2")


@pytest.mark.parametrize(
    ("what", "where"),
    [("vectors", "the input of layer 0"), ("output", "the logits"), ("stages", "the output of its stage")],
)
def test_mistakes_in_the_ends_are_found(
    what: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path, "llama", layers=4)
    if what == "vectors":
        doubled(VocabularyParallel, monkeypatch)
    elif what == "output":
        own_colwise = tensor_plan._Cutter._colwise

        def colwise(self: Any, place: str, parent: Any, name: str, part: tuple[int, int]) -> None:
            total, (start, stop) = getattr(parent, name).out_features, part
            first = (start + (total // 2 if name == "lm_head" else 0)) % total
            own_colwise(self, place, parent, name, (first, first + stop - start))

        monkeypatch.setattr(tensor_plan._Cutter, "_colwise", colwise)
    else:
        own_forward = shard.StageOutput.forward
        monkeypatch.setattr(
            shard.StageOutput, "forward", lambda self, hidden, *_, **__: own_forward(self, hidden * 1.01)
        )
    assert where in refusal(directory, "tp2_pp2" if what == "stages" else "tp2")


def test_experts_that_are_spread_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two instances holds half of them; all else is compared."""
    directory = make_tiny_model(tmp_path, "qwen2_moe", layers=3)
    config = EngineConfig(model=ModelConfig(model=str(directory), dtype="float32"))

    def load() -> None:
        executor = ThreadedShards(config, read_model_info(directory), tp=2, place=(0, 2))
        try:
            executor.load(lambda _phase: None)
        finally:
            executor.close()

    load()
    doubled(RowParallelLinear, monkeypatch)
    with pytest.raises(CheckpointError, match="layer 0 differs by"):
        load()


# ---- plans


def test_entries_of_a_plan_that_are_not_applied_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies below a module that is styled as a whole is not looked at."""
    directory = make_tiny_model(tmp_path, "llama")
    plan = {"layers.*.mlp": "replicated_with_grad_allreduce"}
    monkeypatch.setattr(shard, "GAPS", {"llama": plan})
    message = refusal(directory, "tp2")
    assert "these entries of its plan are not applied: model.layers.*.mlp.down_proj ('rowwise')" in message
    assert "model.layers.*.mlp.up_proj ('colwise'). Use -tp 1" in message


def test_entries_of_a_plan_for_other_models_of_the_family_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    monkeypatch.setattr(shard, "GAPS", {"llama": {"layers.*.mlp.experts.up_proj": "colwise"}})
    executor = shards(directory, LAYOUTS["tp2"])
    executor.close()


# ---- what it takes


def test_each_kind_of_layer_is_read_once_and_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path, "gemma3", layers=4)  # two kinds, in turn
    own = uncut.uncut_run
    read: list[range] = []
    alive: list[int] = []

    def watched(sharded: Any, load: uncut.Load, device: torch.device) -> uncut.UncutRun:
        models: list[weakref.ref[Any]] = []

        def loaded(part: Any) -> Any:
            alive.append(sum(model() is not None for model in models[1:]))  # without the ends
            model = load(part)
            models.append(weakref.ref(model))
            read.append(part.layers)
            return model

        return own(sharded, loaded, device)

    monkeypatch.setattr(weights, "uncut_run", watched)
    executor = shards(directory, LAYOUTS["tp2_pp2"])
    executor.close()
    assert read == [range(0), range(1), range(1, 2), range(3, 4)]
    assert alive == [0, 0, 0, 0]


def test_what_is_no_number_in_the_uncut_model_is_not_compared() -> None:
    """Rows that only fill up a vocabulary may hold anything."""
    judge = cut_check._Judge("model", shard.WHOLE)
    logits = torch.randn(3, 8)
    logits[:, 7] = torch.nan
    judge.same("logits", logits, logits)
    judge.conclude()
    judge.same("logits", torch.full_like(logits, torch.nan), logits)
    with pytest.raises(CheckpointError, match="logits is not finite"):
        judge.conclude()


def test_a_model_is_left_as_it_was(tmp_path: Path) -> None:
    """The model stays in bfloat16, and keeps its serving attention and its own functions."""
    directory = make_tiny_model(tmp_path, "gemma3", layers=4, dtype=torch.bfloat16)
    config = EngineConfig(model=ModelConfig(model=str(directory), dtype="bfloat16"))
    executor = ThreadedShards(config, read_model_info(directory), tp=2)
    executor.load(lambda _phase: None)
    for model in executor.facts():
        assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
        assert not [part for part in model.module.modules() if "forward" in vars(part)]
        followed = {model.module, model.module.base_model}  # by engine.attention.current_call
        assert {part for part in model.module.modules() if part._forward_hooks} == followed
        assert model.module.config._attn_implementation == "lockstep"
    executor.close()
