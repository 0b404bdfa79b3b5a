"""Rotary embeddings, keys and values by one kernel, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from engine.attention import triton_paged
from engine.attention.base import (
    IMPLEMENTATION,
    LAYER_ATTRIBUTE,
    PLAN_KEYWORD,
    LayerShape,
    PackedRows,
    paged_attention,
)
from engine.gpu import fused_launches, fused_layers
from engine.gpu.late_rotary import LATE, LateNorm, LateRotation, hands_norms_over, hands_over, turn_late
from tests.engine.tiny_models import FAMILIES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("dtype", "dims"), [(torch.float32, (16, 16)), (torch.bfloat16, (12, 20))])
@pytest.mark.parametrize("plus_one", [None, False, True])
def test_one_kernel_gives_the_bits_of_several(
    dtype: torch.dtype, dims: tuple[int, int], plus_one: bool | None
) -> None:
    """With norms of heads, unless ``plus_one`` is None."""
    numbers = torch.Generator().manual_seed(3)
    tokens, heads, kv_heads, (dim, value_dim) = 5, 4, 2, dims

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers).to(DEVICE, dtype)

    merged = draw(1, tokens, (heads + kv_heads) * dim + kv_heads * value_dim)
    parts = merged.split([heads * dim, kv_heads * dim, kv_heads * value_dim], dim=-1)
    query, key, value = (
        part.view(1, tokens, -1, width).transpose(1, 2)
        for part, width in zip(parts, (dim, dim, value_dim), strict=True)
    )
    cos, sin = draw(1, tokens, dim), draw(1, tokens, dim)
    slots = torch.tensor([7, 0, 3, 4, 9], device=DEVICE)
    keys, values = draw(11, kv_heads, dim), draw(11, kv_heads, value_dim)
    wanted_keys, wanted_values = keys.clone(), values.clone()
    norms, normed = None, [query, key]
    if plus_one is not None:
        norms = LateNorm(draw(dim), 1e-3, plus_one), LateNorm(draw(dim), 1e-3, plus_one)
        normed = [
            fused_launches.rms_norm(each, norm.weight, norm.epsilon, plus_one=plus_one)
            for each, norm in zip(normed, norms, strict=True)
        ]
    turned_query, turned_key = fused_launches.rotate(normed[0], normed[1], cos, sin)
    wanted_keys[slots], wanted_values[slots] = turned_key[0].transpose(0, 1), value[0].transpose(0, 1)
    found = fused_launches.rotate_and_store(
        LateRotation(cos, sin, norms), query[0], key[0], value[0], keys, values, slots
    )
    assert torch.equal(found, turned_query[0])
    assert torch.equal(keys, wanted_keys)
    assert torch.equal(values, wanted_values)


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_moe", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("qwen3", "gemma2"))],
)
def test_a_model_that_turns_late_gives_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "DEVICES", {"cpu", "cuda"})
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    torch.manual_seed(5)
    config = FAMILIES[family]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION)
    model.to(DEVICE).eval().requires_grad_(False)
    fused_layers.fuse_layers(model)
    layers = [module for module in model.modules() if hasattr(module, "o_proj")]
    dim = layers[0].head_dim
    for index, layer in enumerate(layers):
        setattr(layer, LAYER_ATTRIBUTE, index)
    shapes = [LayerShape(config.num_key_value_heads, dim, dim, None) for _ in layers]
    turned: list[Any] = []
    launch = fused_launches.rotate_and_store

    def noted(*arguments: Any) -> torch.Tensor:
        turned.append(arguments[0].norms is not None)
        return launch(*arguments)

    monkeypatch.setattr(fused_launches, "rotate_and_store", noted)
    ids = torch.tensor([[5, 9, 3, 77]], device=DEVICE)
    positions = np.arange(4)
    rows = PackedRows(np.array([0]), np.array([4]), np.array([[2, 0]], dtype=np.int32), positions, 0)

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        cache = triton_paged.TritonPagedAttention(
            shapes, num_blocks=3, block_size=2, dtype=torch.float32, device=DEVICE
        )
        with torch.inference_mode():
            options = {PLAN_KEYWORD: cache.plan(rows)}
            at = torch.arange(4, device=DEVICE)[None]
            return model(input_ids=ids, position_ids=at, use_cache=False, **options).logits, cache.stored

    expected, expected_cache = run()
    assert not turned
    turn_late(model, PLAN_KEYWORD)
    logits, cache = run()
    assert turned == [hasattr(layers[0], "q_norm")] * len(layers)
    assert torch.equal(logits, expected)
    assert all(torch.equal(one, other) for one, other in zip(cache, expected_cache, strict=True))
    assert not LATE.on


def test_the_check_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused_layers.stores_alike()
    launch = fused_launches.rotate_and_store
    for wrong in (
        lambda turn, query, key, value, *rest: launch(turn, query, key, value * 2, *rest),
        lambda turn, *rest: launch(LateRotation(turn.sin, turn.cos), *rest),
    ):
        monkeypatch.setattr(fused_launches, "rotate_and_store", wrong)
        assert not fused_layers.stores_alike()


def apply_rotary_pos_emb(query, key, cos, sin):
    return query, key


class Straight:
    def forward(self, query, key, value, cos, sin, past_key_values=None):
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value)
        output, _ = self.attention(self, query, key, value)  # type: ignore[attr-defined]
        return output


class Scales(Straight):
    def forward(self, query, key, value, cos, sin, past_key_values=None):
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        query = query * 2.0
        output, _ = self.attention(self, query, key, value)  # type: ignore[attr-defined]
        return output


class Sometimes(Straight):
    def forward(self, query, key, value, cos, sin, past_key_values=None):
        if cos is not None:
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
        output, _ = self.attention(self, query, key, value)  # type: ignore[attr-defined]
        return output


class Swaps(Straight):
    def forward(self, query, key, value, cos, sin, past_key_values=None):
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        output, _ = self.attention(self, key, query, value)  # type: ignore[attr-defined]
        return output


class LooksAgain(Straight):
    def forward(self, query, key, value, cos, sin, past_key_values=None):
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        output, _ = self.attention(self, query, key, value, norm=query.norm())  # type: ignore[attr-defined]
        return output


def test_only_layers_that_hand_both_over_as_they_are_turn_late() -> None:
    kinds = (Straight, Scales, Sometimes, Swaps, LooksAgain, int)
    assert [hands_over(kind, "apply_rotary_pos_emb") for kind in kinds] == [True, *[False] * 5]


class Norms(Straight):
    def forward(self, query, key, value, cos, sin, past_key_values=None):
        query_states = self.q_norm(query.view(1, -1)).transpose(1, 2)  # type: ignore[attr-defined]
        key_states = self.k_norm(key.view(1, -1)).transpose(1, 2)  # type: ignore[attr-defined]
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        output, _ = self.attention(self, query_states, key_states, value)  # type: ignore[attr-defined]
        return output


class NormsAndScales(Straight):
    def forward(self, query, key, value, cos, sin, past_key_values=None):
        query_states = self.q_norm(query.view(1, -1)).transpose(1, 2)  # type: ignore[attr-defined]
        key_states = self.k_norm(key.view(1, -1)).transpose(1, 2)  # type: ignore[attr-defined]
        query_states = query_states * 2.0
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        output, _ = self.attention(self, query_states, key_states, value)  # type: ignore[attr-defined]
        return output


class ScalesNorms(Straight):
    def forward(self, query, key, value, cos, sin, past_key_values=None):
        query_states = (self.q_norm(query.view(1, -1)) * 2.0).transpose(1, 2)  # type: ignore[attr-defined]
        key_states = self.k_norm(key.view(1, -1)).transpose(1, 2)  # type: ignore[attr-defined]
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        output, _ = self.attention(self, query_states, key_states, value)  # type: ignore[attr-defined]
        return output


def test_only_norms_right_before_rotary_embeddings_are_late() -> None:
    kinds = (Norms, NormsAndScales, ScalesNorms, Straight)
    assert [hands_norms_over(kind, "apply_rotary_pos_emb") for kind in kinds] == [True, *[False] * 3]
    norm = LateNorm(torch.ones(4), 1e-6, False)
    LATE.keep_norm(norm)
    with pytest.raises(RuntimeError, match="1 norms of heads before a rotation"):
        LATE.take_norms()
    LATE.keep_norm(norm)
    LATE.keep_norm(norm)
    with pytest.raises(RuntimeError, match="not normalised yet"):
        LATE.check()
    assert LATE.take_norms() is None


def test_what_was_changed_on_its_way_is_an_error() -> None:
    query, key, cos = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 3, 4)
    assert LATE.take(query, key) is None
    LATE.put(query, key, LateRotation(cos, cos))
    with pytest.raises(RuntimeError, match="changed its queries or keys"):
        LATE.take(query * 2, key)
    assert LATE.take(query, key) is None, "once"
    LATE.put(query, key, LateRotation(cos, cos))
    with pytest.raises(RuntimeError, match="changed its queries or keys"):
        LATE.put(query, key, LateRotation(cos, cos))
