"""Names: how transformers' tensors are made from those of a GGUF file (pure).

llama.cpp stores the experts of a layer as one stack, turns Llama's heads so that neighbours are a pair, adds
1 to Gemma's norms, and takes GPT-OSS's matrices of experts apart. All of that is undone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from engine.model.gguf.configs import FACTORS
from engine.model.gguf.reading import GgufError, GgufHeader, Shape


@dataclass(frozen=True)
class Recipe:
    """Recipe for one tensor: source tensors of a GGUF file, and rearrangement."""

    tensors: tuple[str, ...]
    """Tensors of the file; the outputs of two alternate."""
    expert: int | None = None
    """Number of the expert in a stack; None: no stack."""
    heads: int = 0
    """Heads whose outputs are turned back; 0: they are as they should be."""
    minus: float = 0.0
    is_turned: bool = False
    """Whether outputs and inputs change places."""


OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms before and behind attention and MLP."""
PARTS = {
    "llama": ATTENTION | MLP,
    "qwen2": ATTENTION | MLP,
    "qwen3": ATTENTION | MLP,
    "qwen3moe": ATTENTION | MLP | {"ffn_gate_inp": "mlp.gate"},
    "gemma2": ATTENTION | MLP | SANDWICH,
    "gemma3": ATTENTION | MLP | SANDWICH,
    "gpt-oss": ATTENTION | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
}
"""Names of a layer's parts in the file, and in transformers, by architecture."""
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
IGNORED = re.compile(rf"{re.escape(FACTORS)}|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that are no part of the model's layers."""


def recipes_of(header: GgufHeader) -> dict[str, Recipe]:
    """Recipes by transformers' names.

    Raises:
        GgufError: a tensor is not known.
    """
    return {
        name: recipe
        for tensor, entry in header.tensors.items()
        if not IGNORED.fullmatch(tensor)
        for name, recipe in _recipes(header, tensor, entry.shape)
    }


def _recipes(header: GgufHeader, tensor: str, shape: Shape) -> Iterator[tuple[str, Recipe]]:
    """Recipes that begin with one tensor of a GGUF file."""
    architecture = header.architecture
    minus = 1.0 if architecture.startswith("gemma") and tensor.endswith("norm.weight") else 0.0
    if tensor in OUTER:
        yield OUTER[tensor], Recipe((tensor,), minus=minus)
        return
    found = OF_LAYER.fullmatch(tensor)
    if found is None:
        raise _unknown(architecture, tensor)
    layer, part, kind = found.groups()
    begin = f"model.layers.{layer}"
    if part in EXPERTS and architecture == "qwen3moe" and kind == "weight":
        for expert in range(shape[0]):
            yield f"{begin}.mlp.experts.{expert}.{EXPERTS[part]}.weight", Recipe((tensor,), expert)
    elif part in EXPERTS and architecture == "gpt-oss":
        yield from _of_gpt_oss(f"{begin}.mlp.experts", tensor, part, kind)
    elif part == "attn_sinks" and architecture == "gpt-oss":
        yield f"{begin}.self_attn.sinks", Recipe((tensor,))
    elif part in PARTS[architecture]:
        heads = 0
        if architecture == "llama" and part in ("attn_q", "attn_k"):
            heads = _heads(header, "attention.head_count" if part == "attn_q" else "attention.head_count_kv")
        yield f"{begin}.{PARTS[architecture][part]}.{kind}", Recipe((tensor,), heads=heads, minus=minus)
    else:
        raise _unknown(architecture, tensor)


def _of_gpt_oss(begin: str, tensor: str, part: str, kind: str) -> Iterator[tuple[str, Recipe]]:
    end = "" if kind == "weight" else "_bias"
    is_turned = kind == "weight"
    if part == "ffn_down_exps":
        yield f"{begin}.down_proj{end}", Recipe((tensor,), is_turned=is_turned)
    elif part == "ffn_gate_exps":
        other = tensor.replace("ffn_gate_exps", "ffn_up_exps")
        yield f"{begin}.gate_up_proj{end}", Recipe((tensor, other), is_turned=is_turned)


def _heads(header: GgufHeader, name: str) -> int:
    values, prefix = header.metadata, header.architecture
    found = values.get(f"{prefix}.{name}", values.get(f"{prefix}.attention.head_count", 0))
    return int(found[0] if isinstance(found, list) else found)


def _unknown(architecture: str, tensor: str) -> GgufError:
    return GgufError(
        f"{tensor} is not known in a file of the architecture {architecture}: use a checkpoint with "
        "*.safetensors"
    )
