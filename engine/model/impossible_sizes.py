"""Sizes in a config.json that no layer here can have (pure).

They are refused with their numbers before weights are fetched. The chunk size of a recurrent layer may be
any above 0: layers are computed on a grid of their own, whose cells are padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SHARED_GROUPS = (
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("mamba_n_heads", "mamba_n_groups"),
    ("mamba_num_heads", "n_groups"),
    ("num_heads", "n_groups"),
    ("n_mamba_heads", "mamba_ngroups"),
)
"""Heads of recurrent states, and the key heads or groups that divide them."""
RECURRENT_SIZES = (
    "chunk_size",
    "mamba_chunk_size",
    "conv_kernel",
    "conv_L_cache",
    "linear_conv_kernel_dim",
    "mamba_d_conv",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
)
"""Sizes of layers with a recurrent state, which must be above 0."""
CHOICE_SIZES = "index_topk", "index_topk_blocks", "index_block_size"
"""Numbers of keys, or of their blocks, that an indexer chooses."""


def why_sizes_refused(text: Mapping[str, Any], defaults: Mapping[str, Any], *, has_states: bool) -> str:
    """The reason for which sizes rule a language model out, or an empty text.

    It is the end of a sentence.

    Args:
        text: its part of a config.json.
        defaults: of its configuration class, where the file is silent.
        has_states: whether it has layers with a recurrent state.
    """
    sizes = {**defaults, **text}
    for name in (*RECURRENT_SIZES * has_states, *CHOICE_SIZES):
        if isinstance(size := sizes.get(name), int) and size < 1:
            return f"has {name} {size} in its config.json, which must be above 0"
    if has_states and (uneven := next(_uneven(sizes), "")):
        return uneven
    return _why_biases_refused(sizes)


def _uneven(sizes: Mapping[str, Any]) -> Iterator[str]:
    """Errors for heads of states that groups do not share evenly."""
    for heads, groups in SHARED_GROUPS:
        count, parts = sizes.get(heads), sizes.get(groups)
        if isinstance(count, int) and isinstance(parts, int) and (parts < 1 or count < 1 or count % parts):
            yield f"has {heads} {count} and {groups} {parts} in its config.json, which do not divide"


def _why_biases_refused(sizes: Mapping[str, Any]) -> str:
    """Error text for linear biases (ALiBi) of heads that share keys, as Falcon may have."""
    if sizes.get("model_type") != "falcon" or not sizes.get("alibi"):
        return ""
    heads = sizes.get("num_attention_heads")
    keys = sizes.get("num_kv_heads") or heads
    if not sizes.get("new_decoder_architecture"):
        keys = 1 if sizes.get("multi_query") else heads
    if keys == heads:
        return ""
    return (
        f"has linear biases (ALiBi) and {heads} attention heads that share {keys} KV heads: biases of heads "
        "that share keys are not built"
    )
