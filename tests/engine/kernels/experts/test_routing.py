"""How routers' logits become experts and weights: the kernels against transformers' routers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.granitemoe import modeling_granitemoe as granite
from transformers.models.hunyuan_v1_moe import modeling_hunyuan_v1_moe as hunyuan
from transformers.models.minimax_m2 import modeling_minimax_m2 as minimax
from transformers.models.phimoe import modeling_phimoe as phimoe
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2

from engine.kernels.core import library
from engine.kernels.core.operations import OperationKind, OperationList, StepArguments
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.experts.routing import Routing, router_of, routing_of, weights_of

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
HIDDEN, ROWS = 64, 33
SMALL = {"intermediate_size": 16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


@cache
def kernels(kind: str) -> library.KernelLibrary:
    found = library.load() if kind == "best" else library.opened("avx2")
    assert found is not None
    return found


def choose(
    logits: torch.Tensor, how: Routing, dtype: torch.dtype, kind: str = "best"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts [rows, k] for logits [rows, experts] in float32."""
    rows, experts = logits.shape
    weights, ids = torch.empty(rows, how.top_k), torch.full((rows, how.top_k), -1)
    operations, record = OperationList(1), how.record(dtype)
    fields = {"into": logits, "out": weights, "extra": ids, "more": record, "n": experts, "k": how.top_k}
    operations.add(OperationKind.ROUTE, **fields)
    operations.run(kernels(kind), StepArguments(tokens=rows), dtype)
    return weights, ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (16, 4), (40, 20), (128, 8)])
def test_softmax_and_the_largest(experts: int, top_k: int, normalised: bool, dtype: torch.dtype) -> None:
    """As torch's softmax and topk.

    The first of equals, and something also where there is no number.
    """
    logits = 3 * torch.randn(9, experts)
    logits[1] = 1.5
    logits[2, ::2] = logits[2, 1]
    how = Routing(top_k, normalised=normalised)
    weights, ids = choose(logits, how, dtype)
    rounded = logits.to(dtype).float()
    best = np.argsort(-rounded.numpy(), axis=1, kind="stable")[:, :top_k]
    assert ids.tolist() == best.tolist()
    expected = rounded.softmax(dim=-1).gather(1, ids)
    if normalised:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(weights, expected.to(dtype).float(), atol=1e-6, rtol=TOLERANCE[dtype])
    logits[:, 1] = float("nan")
    _, ids = choose(logits, how, dtype)
    assert all(len(set(row)) == top_k and 0 <= min(row) <= max(row) < experts for row in ids.tolist())


def grouped(**changes: Any) -> dict[str, Any]:
    return {
        "n_routed_experts": 24,
        "num_experts_per_tok": 5,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 16,
    } | changes


def block(kind: Any, config: Any, **fields: Any) -> Any:
    """A mixture of this kind with random weights."""
    torch.manual_seed(3)
    made = kind(config(hidden_size=HIDDEN, **fields))
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.normal_(0.0, 0.2)
    return made


BLOCKS: dict[str, Callable[[], Any]] = {
    "softmax": lambda: block(qwen2.Qwen2MoeSparseMoeBlock, qwen2.Qwen2MoeConfig, num_experts=20, **SMALL),
    "softmax of the chosen": lambda: block(
        gpt_oss.GptOssMLP, gpt_oss.GptOssConfig, num_local_experts=20, num_experts_per_tok=3, **SMALL
    ),
    "softmax of the chosen, in float32": lambda: block(
        granite.GraniteMoeMoE, granite.GraniteMoeConfig, num_local_experts=20, num_experts_per_tok=3, **SMALL
    ),
    "softmax by a linear layer": lambda: block(
        hunyuan.HunYuanMoEV1Moe, hunyuan.HunYuanMoEV1Config, num_experts=20, moe_topk=3, intermediate_size=16
    ),
    "softmax with a correction": lambda: block(
        ernie.Ernie4_5_MoeSparseMoeBlock, ernie.Ernie4_5_MoeConfig, moe_num_experts=20, moe_k=3, **SMALL
    ),
    "softmax with a factor": lambda: block(
        deepseek_v2.DeepseekV2Moe, deepseek_v2.DeepseekV2Config, **grouped(topk_method="greedy")
    ),
    "softmax in groups": lambda: block(
        deepseek_v2.DeepseekV2Moe, deepseek_v2.DeepseekV2Config, **grouped(topk_method="group_limited_greedy")
    ),
    "sigmoids with a correction": lambda: block(
        minimax.MiniMaxM2SparseMoeBlock,
        minimax.MiniMaxM2Config,
        num_local_experts=20,
        num_experts_per_tok=3,
        intermediate_size=16,
    ),
    "sigmoids in groups": lambda: block(deepseek_v3.DeepseekV3MoE, deepseek_v3.DeepseekV3Config, **grouped()),
    "sigmoids as they are": lambda: block(
        deepseek_v3.DeepseekV3MoE, deepseek_v3.DeepseekV3Config, **grouped(norm_topk_prob=False)
    ),
    "each by itself": lambda: block(
        phimoe.PhimoeSparseMoeBlock,
        phimoe.PhimoeConfig,
        num_local_experts=16,
        router_jitter_noise=0.1,
        intermediate_size=16,
    ),
}


@pytest.mark.parametrize("kind", ["best", "avx2"])
@pytest.mark.parametrize("name", BLOCKS)
def test_experts_and_weights_are_those_of_the_router(name: str, kind: str) -> None:
    for dtype in DTYPES[: 1 if name == "each by itself" else 2]:  # which is computed in float32
        mixture = BLOCKS[name]().eval()
        kept = (
            "correction_bias",
            *("gate.weight" for part in mixture.modules() if hasattr(part, "moe_statics")),
        )
        for tensor_name, tensor in (*mixture.named_parameters(), *mixture.named_buffers()):
            if not tensor_name.endswith(kept):  # transformers keeps these in float32
                tensor.data = tensor.data.to(dtype)
        router = router_of(mixture)
        rows = 5 * torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
        more = [mixture.e_score_correction_bias] if "minimax" in type(mixture).__module__ else []
        with torch.no_grad():
            logits, expected, chosen = router(rows, *more)
            weight, bias = weights_of(router)
            bias = None if bias is None else bias.float()
            by_weight = torch.nn.functional.linear(rows.float(), weight.float(), bias)
        torch.testing.assert_close(by_weight, logits.float(), atol=0.05, rtol=0.02)
        how = routing_of(mixture, dtype)
        weights, ids = choose(logits.float(), how, dtype, kind)
        order, ours = chosen.argsort(dim=-1), ids.argsort(dim=-1)
        assert ids.gather(1, ours).tolist() == chosen.gather(1, order).tolist(), dtype
        torch.testing.assert_close(
            weights.gather(1, ours), expected.float().gather(1, order), atol=1e-6, rtol=TOLERANCE[dtype]
        )


def test_a_router_with_other_weights_is_refused() -> None:
    mixture = BLOCKS["softmax"]()
    mixture.gate.scale = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(NotRecognised, match="a router with scale, weight"):
        routing_of(mixture, torch.float32)
    del mixture.gate
    with pytest.raises(NotRecognised, match="without a router"):
        routing_of(mixture, torch.float32)
