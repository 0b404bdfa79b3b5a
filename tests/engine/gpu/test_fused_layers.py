"""Kernels in place of many operators, in Triton's interpreter, on layers of real families."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.gpu import fused_launches, fused_layers
from engine.gpu.fused_layers import FusedRotary, MergedLinear, fuse_layers
from tests.engine.tiny_models import FAMILIES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make(family: str, dtype: torch.dtype):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    return model.to(DEVICE).eval().requires_grad_(False)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings are turned by the kernel on a CPU, too."""
    monkeypatch.setattr(fused_layers, "DEVICES", {"cpu", "cuda"})


@pytest.mark.parametrize(
    ("family", "dtype", "norms", "merged", "gates"),
    [
        ("qwen3", torch.float32, 9, 4, 2),
        ("llama", torch.bfloat16, 5, 4, 2),
        ("gemma2", torch.float32, 17, 8, 4),  # weights are one less than the factors; GELU
        ("qwen3_moe", torch.float32, 9, 2, 2),
        ("gpt_oss", torch.float32, 9, 4, 0),  # a gate of its own, and half as many angles
    ],
)
def test_a_fused_model_gives_the_same_logits(family, dtype, norms, merged, gates, anywhere) -> None:
    model = make(family, dtype)
    ids = torch.tensor([[5, 9, 3, 77]], device=DEVICE)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        found = fuse_layers(model).counts
        logits = model(input_ids=ids, use_cache=False).logits.float()
    assert found == {
        "norms": norms,
        "merged products": merged,
        "gates": gates,
        "rotary embeddings": int(family != "gpt_oss"),
    }
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(logits, expected, atol=tolerance * float(expected.abs().max()), rtol=tolerance)
    rotary = sys.modules[type(model).__module__].apply_rotary_pos_emb
    assert isinstance(rotary, FusedRotary) == (family != "gpt_oss")


def test_products_with_one_input_are_one_product() -> None:
    layers = [torch.nn.Linear(6, size, bias=True) for size in (4, 2, 3)]
    inputs, others = torch.randn(1, 5, 6), torch.randn(1, 5, 6)
    with torch.inference_mode():
        expected = [[layer(each) for layer in layers] for each in (inputs, others)]
        weight, bias = (torch.cat([getattr(each, name) for each in layers]) for name in ("weight", "bias"))
        merged = MergedLinear(layers, partial(torch.nn.functional.linear, weight=weight, bias=bias))
        parts = [merged.part(index) for index in range(3)]
        found = [part(inputs) for part in parts]
        mixed = [parts[0](inputs), parts[1](others), parts[2](inputs)]
    for one, other in zip(found, expected[0], strict=True):
        torch.testing.assert_close(one, other)
    assert found[0].untyped_storage().data_ptr() == found[2].untyped_storage().data_ptr()
    for one, other in zip(mixed, [expected[0][0], expected[1][1], expected[0][2]], strict=True):
        torch.testing.assert_close(one, other)
    assert merged._input is None, "inputs are not kept"


def test_merged_layers_keep_no_weights_of_their_own() -> None:
    attention = torch.nn.Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, torch.nn.Linear(6, 4, bias=False))
    assert fuse_layers(attention).counts["merged products"] == 1
    first, last = (layer.weight.untyped_storage() for layer in (attention.q_proj, attention.v_proj))
    assert first.data_ptr() == last.data_ptr()
    assert first.nbytes() == 3 * 4 * 6 * 4


class OtherRMSNorm(torch.nn.Module):
    """One that subtracts the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.variance_epsilon = 1e-6

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.nn.functional.layer_norm(hidden + 2.0, (8,))


class NamelessRMSNorm(torch.nn.Module):
    """One whose epsilon has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, (8,), self.weight, 1e-6)


def test_a_layer_that_rounds_its_inputs_is_not_merged() -> None:
    attention = torch.nn.Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, torch.nn.Linear(4, 4))
    attention.k_proj.forward = lambda inputs: inputs.round()  # type: ignore[method-assign]
    assert fuse_layers(attention).counts["merged products"] == 0
    assert torch.equal(attention.k_proj(torch.full((1, 4), 1.4)), torch.ones(1, 4))
    del attention.k_proj.forward
    assert fuse_layers(attention).counts["merged products"] == 1


@pytest.mark.parametrize("make_norm", [OtherRMSNorm, NamelessRMSNorm])
def test_a_norm_that_computes_something_else_is_left_as_it_is(make_norm) -> None:
    norm = make_norm().to(DEVICE)
    assert fuse_layers(torch.nn.Sequential(norm)).counts["norms"] == 0
    assert "forward" not in vars(norm)


class OddLayer(torch.nn.Module):
    """A feed-forward layer that may be asked for more than a tensor."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always
        self.gate_proj, self.up_proj = torch.nn.Linear(4, 8), torch.nn.Linear(4, 8)
        self.down_proj = torch.nn.Linear(8, 4)

    def forward(self, hidden: torch.Tensor, more: bool = False):
        inner = torch.nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        return (self.down_proj(inner), inner) if more or self.always else self.down_proj(inner)


def test_layers_that_give_more_than_a_tensor_keep_their_way() -> None:
    hidden = torch.randn(1, 3, 4).to(DEVICE)
    with torch.no_grad():
        odd, sometimes = OddLayer(always=True).to(DEVICE), OddLayer(always=False).to(DEVICE)
        assert fuse_layers(odd).counts["gates"] == 0
        assert isinstance(odd(hidden), tuple)
        expected = sometimes(hidden)
        assert fuse_layers(sometimes).counts["gates"] == 1
        torch.testing.assert_close(sometimes(hidden), expected)
        torch.testing.assert_close(sometimes(hidden, more=True)[0], expected)


def test_rotary_embeddings_of_another_kind_are_left_as_they_are() -> None:
    interleaved = FusedRotary(lambda q, k, cos, sin: (q * cos[:, None], k * cos[:, None]))
    assert not interleaved.agrees()
    refuses = FusedRotary(lambda q, k, freqs: (q, k))
    assert not refuses.agrees()


def test_what_does_not_fit_takes_the_familys_own_way() -> None:
    said = []

    def plain(q, k, cos, sin, unsqueeze_dim=1):
        said.append(tuple(cos.shape))
        return q, k

    fused = FusedRotary(plain)
    query, key = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
    fused(query, key, torch.ones(1, 3, 8), torch.ones(1, 3, 8))  # on a CPU
    assert said == [(1, 3, 8)]
    assert fused_layers.fits(query, key, torch.ones(1, 3, 8))
    assert not fused_layers.fits(query, key, torch.ones(1, 3, 4)), "only a part of each vector is turned"
    assert not fused_layers.fits(query, key, torch.ones(3, 3, 8))
    assert not fused_layers.fits(query, key, torch.ones(1, 3, 8, dtype=torch.float64)), (
        "results have its type"
    )
    assert not fused_layers.fits(query[..., ::2], key[..., ::2], torch.ones(1, 3, 4))
    assert fused_launches.rotate(query[:, :, :0], key[:, :, :0], query[:, 0, :0], query[:, 0, :0])[
        0
    ].shape == (1, 4, 0, 8)
    assert fused_launches.rms_norm(torch.ones(1, 0, 8), torch.ones(8), 1e-6, plus_one=False).shape == (
        1,
        0,
        8,
    )
    batches = torch.randn(3, 2, 8)
    expected = torch.nn.functional.rms_norm(batches, (8,), torch.ones(8), 1e-6)
    found = fused_launches.rms_norm(batches.to(DEVICE), torch.ones(8).to(DEVICE), 1e-6, plus_one=False)
    torch.testing.assert_close(found.cpu(), expected)
