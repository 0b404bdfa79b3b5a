"""Layers whose products take norms, activations and residuals in, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2DecoderLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeDecoderLayer

from engine.gpu import few_rows, fused_launches, fused_layers, layer_products
from engine.gpu.few_rows import FewRowsLayer, fuse_few_rows, is_usual, leave_layers
from engine.gpu.late_rotary import LateNorm
from engine.gpu.layer_products import MOST_ROWS, layer_product
from tests.engine.gpu.families import own_functions_again
from tests.engine.tiny_models import FAMILIES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 19])
def test_a_product_takes_in_what_stands_beside_it(dtype: torch.dtype, has_bias: bool, rows: int) -> None:
    inputs, outputs = 72, 40
    weight, bias = draw(outputs, inputs, dtype=dtype), draw(outputs, dtype=dtype) if has_bias else None
    hidden, residual = draw(1, rows, inputs, dtype=dtype), draw(1, rows, outputs, dtype=dtype)
    both = draw(1, rows, 2 * inputs, dtype=dtype)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.3, "rtol": 2e-2}
    for plus_one in (False, True):
        norm = LateNorm(draw(inputs, dtype=dtype), 0.1, plus_one)
        normed = fused_launches.rms_norm(hidden, norm.weight, norm.epsilon, plus_one=plus_one)
        found = layer_product(hidden, weight, bias, norm=norm)
        torch.testing.assert_close(found, F.linear(normed, weight, bias), **tolerance)
    for tanh in (False, True):
        expected = F.linear(fused_launches.gated(both, tanh=tanh), weight, bias) + residual
        found = layer_product(both, weight, bias, gate=tanh, residual=residual)
        torch.testing.assert_close(found, expected, **tolerance)
    found = layer_product(hidden, weight, bias, residual=residual)
    torch.testing.assert_close(found, F.linear(hidden, weight, bias) + residual, **tolerance)


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    """In any number of rows: tiles follow the matrix alone."""
    weight = draw(40, 144, dtype=torch.bfloat16)
    hidden, residual = draw(21, 144, dtype=torch.bfloat16), draw(21, 40, dtype=torch.bfloat16)
    norm = LateNorm(draw(144, dtype=torch.bfloat16), 1e-6, False)
    together = layer_product(hidden, weight, norm=norm, residual=residual)
    for row in (0, 15, 16, 20):
        alone = layer_product(hidden[row : row + 1], weight, norm=norm, residual=residual[row : row + 1])
        assert torch.equal(alone, together[row : row + 1])


def test_usual_layers_are_known_by_their_source() -> None:
    assert is_usual(LlamaDecoderLayer, LlamaAttention)
    assert is_usual(Qwen3DecoderLayer, Qwen3Attention)
    assert is_usual(Qwen3MoeDecoderLayer, Qwen3MoeAttention)
    assert not is_usual(Gemma2DecoderLayer, Gemma2Attention), "norms stand behind its products, too"
    assert not is_usual(LooksAtNormed, LlamaAttention)
    assert not is_usual(LlamaDecoderLayer, UsesInputsTwice)
    assert not is_usual(int, LlamaAttention)


class LooksAtNormed(torch.nn.Module):
    def forward(self, hidden_states, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden_states = residual + 0.5 * hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class UsesInputsTwice(torch.nn.Module):
    def forward(self, hidden_states, **kwargs):
        shape = hidden_states.shape
        query = self.q_proj(hidden_states).view(shape)
        key, value = self.k_proj(hidden_states), self.v_proj(hidden_states)
        attn_output, attn_weights = self.attention(query, key, value, hidden_states)
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 2), ("qwen3", 2), ("qwen2", 2), ("qwen3_moe", 2), ("gemma2", 0)]
)
def test_a_model_gives_the_same_logits_with_few_rows(
    family: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes its own way with many, or once its layers are to be left."""
    monkeypatch.setattr(fused_layers, "DEVICES", {"cpu", "cuda"})
    launched: list[int] = []
    launch = layer_products.layer_product

    def noted(rows: torch.Tensor, *rest, **options) -> torch.Tensor:
        launched.append(rows.shape[1])
        return launch(rows, *rest, **options)

    torch.manual_seed(5)
    config = FAMILIES[family]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    model = model.to(DEVICE).eval().requires_grad_(False)
    few, many = (
        torch.tensor([[5, 9, 3, 77]], device=DEVICE),
        torch.arange(MOST_ROWS + 1, device=DEVICE)[None] % 90,
    )
    with torch.inference_mode(), own_functions_again():
        expected = [model(input_ids=ids, use_cache=False).logits for ids in (few, many)]
        fused = fused_layers.fuse_layers(model)
        assert fuse_few_rows(model, fused.merged) == count
        monkeypatch.setattr(layer_products, "layer_product", noted)
        found = [model(input_ids=ids, use_cache=False).logits for ids in (few, many)]
        per_layer = 2 if family == "qwen3_moe" else 4
        assert launched == [4] * per_layer * count
        leave_layers(model)
        launched.clear()
        assert torch.isfinite(model(input_ids=few, use_cache=False).logits).all()
    assert not launched
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * float(other.abs().max()), rtol=1e-4)


def test_products_that_compute_something_else_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "DEVICES", {"cpu", "cuda"})
    launch = layer_products.layer_product

    def without_residual(*arguments, residual=None, **options) -> torch.Tensor:
        return launch(*arguments, **options)

    def with_other_norm(*arguments, norm=None, **options) -> torch.Tensor:
        return launch(*arguments, norm=norm and LateNorm(norm.weight, 1.0, norm.plus_one), **options)

    def without_gate(rows, weight, *rest, gate=None, **options) -> torch.Tensor:
        return launch(rows if gate is None else rows[..., : weight.shape[1]], weight, *rest, **options)

    for wrong in (without_residual, with_other_norm, without_gate):
        model = AutoModelForCausalLM.from_config(FAMILIES["llama"](), attn_implementation="eager")
        with own_functions_again(), monkeypatch.context() as patch:
            fused = fused_layers.fuse_layers(model.to(DEVICE).eval().requires_grad_(False))
            patch.setattr(layer_products, "layer_product", wrong)
            assert fuse_few_rows(model, fused.merged) == 0
        assert not any(isinstance(vars(each).get("forward"), FewRowsLayer) for each in model.modules())


def test_attention_that_skips_a_product_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "DEVICES", {"cpu", "cuda"})
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"](), attn_implementation="eager")
    with own_functions_again():
        fused = fused_layers.fuse_layers(model.to(DEVICE).eval().requires_grad_(False))
        assert fuse_few_rows(model, fused.merged)
        layer = model.model.layers[0]
        monkeypatch.setattr(layer.self_attn, "forward", lambda hidden_states: (hidden_states, None))
        with pytest.raises(RuntimeError, match="did not call its first or its last product"):
            layer(torch.zeros(1, 2, FAMILIES["llama"]().hidden_size, device=DEVICE))
        assert few_rows.FewRowsLayer is type(layer.forward)
        assert layer.forward._parts.output.residual is None
