"""Attention that modules of older families compute themselves, given to transformers' interface.

Newer modules of transformers call the attention function of the model's implementation. Older ones compute
products and softmax in their own code. Here modules of a known kind call the function instead, except in
transformers' own implementations. Linear biases (ALiBi) become two more numbers of each key, and the
queries' numbers beside them are constants: so the biases are part of the product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.base import BIASES_KEYWORD, PLAN_KEYWORD, REACH_KEYWORD, WHOLE_CONTEXT, KeyReach
from engine.attention.current_call import CURRENT

REFERENCES = ("eager", "sdpa")
"""Implementations in which modules compute as transformers made them."""
OWN_REACH = {REACH_KEYWORD: WHOLE_CONTEXT}
"""For modules that make their causal mask themselves."""
BIAS_NUMBERS = 2
"""Numbers of the keys' type that make a bias, nearly as good as float32."""
NO_SHARED_BIASES = "linear biases of heads that share keys are not built"


def first_implementation(model_class: Any, name: str) -> str:
    """The attention implementation in which a class is made that will run in ``name``."""
    can_set = getattr(model_class, "_can_set_attn_implementation", None)
    return name if can_set is None or can_set() else "eager"


def set_implementation(module: Any, name: str) -> None:
    """Set the attention implementation of a model; ``eager`` stands for transformers' reference.

    Falcon's eager attention adds linear biases twice, its other one does not.
    """
    if first_implementation(type(module), name) == name and name != "eager":
        module.set_attn_implementation(name)
    elif any(_kind_of(part) is not None for part in module.modules()):
        is_reference = name in REFERENCES
        module.config._attn_implementation = "sdpa" if is_reference and module._supports_sdpa else name
    else:
        module.set_attn_implementation(name)


def adapt(module: Any, name: str) -> None:
    """Have attention modules of known kinds call the function of the model's implementation, ``name``."""
    for part in list(module.modules()):
        kind = _kind_of(part)
        if kind is not None:
            kind(part, _Attention(part, module.config))
    set_implementation(module, name)


class _Attention:
    """The attention function of a model's implementation, as one of its modules calls it."""

    def __init__(self, module: Any, config: Any) -> None:
        self._module = module
        self._config = config

    @property
    def replaces(self) -> bool:
        """Whether the module's own computation is replaced now."""
        return self._config._attn_implementation not in REFERENCES

    @property
    def positions(self) -> torch.Tensor:
        """[tokens] positions of the call."""
        positions: torch.Tensor = CURRENT.options["position_ids"][0]
        return positions

    def instead_of(self, name: str, own: Callable[..., Any]) -> None:
        """Call ``own`` in place of a method of the module, where that is replaced."""
        method = getattr(self._module, name, None)
        if method is None:  # in a newer transformers, where the module calls the function itself
            return

        def either(*args: Any, **options: Any) -> Any:
            return (own if self.replaces else method)(*args, **options)

        setattr(self._module, name, either)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        **options: Any,
    ) -> torch.Tensor:
        """[1, tokens, heads, dim] of queries, keys and values [1, heads, tokens, dim]."""
        function = ALL_ATTENTION_FUNCTIONS[self._config._attn_implementation]
        plan = {PLAN_KEYWORD: CURRENT.options.get(PLAN_KEYWORD)}
        attended: torch.Tensor = function(
            self._module, query, key, value, mask, scaling=scaling, **plan, **options
        )[0]
        return attended

    def biased(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        biases: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """The same with biases [heads, tokens], added to the keys' scaled products."""
        if key.shape[1] != query.shape[1]:
            raise NotImplementedError(NO_SHARED_BIASES)
        high = biases.to(key.dtype)
        low = (biases - high).to(key.dtype)
        key = torch.cat([key, torch.stack([high, low], dim=-1).unsqueeze(0)], dim=-1)
        factors = query.new_full((*query.shape[:3], BIAS_NUMBERS), 1 / scaling)
        query = torch.cat([query, factors], dim=-1)
        return self(query, key, value, None, scaling, **OWN_REACH, **{BIASES_KEYWORD: BIAS_NUMBERS})


def _inner(module: Any, attention: _Attention) -> None:
    """Modules with a method for products and softmax (GPT-J, CodeGen, GPT-Neo, GPT-NeoX Japanese)."""
    divisor = getattr(module, "scale_attn", None) or getattr(module, "norm_factor", None) or 1.0
    options = {}
    if getattr(module, "attention_type", None) == "local":
        window = int(module.bias[0, 0, -1].sum())
        options[REACH_KEYWORD] = KeyReach(window) if window < module.bias.shape[-1] else WHOLE_CONTEXT

    def attend(query: Any, key: Any, value: torch.Tensor, attention_mask: Any = None) -> Any:
        query, key = query.to(value.dtype), key.to(value.dtype)
        attended = attention(query, key, value, attention_mask, 1.0 / divisor, **options)
        return attended.transpose(1, 2), None

    attention.instead_of("_attn", attend)


def _inner_by_columns(module: Any, attention: _Attention) -> None:
    """Modules with such a method for transposed keys, and a mask of their own (GPT)."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        scaling = value.shape[-1] ** -0.5 if module.scale else 1.0
        attended = attention(query, key.transpose(2, 3), value, None, scaling, **OWN_REACH)
        return [attended.transpose(1, 2)]

    attention.instead_of("_attn", attend)


def _bloom(module: Any, attention: _Attention) -> None:
    """Linear biases, rounded to the model's type."""
    slopes = _slopes(module, module.num_heads)

    def forward(hidden_states: torch.Tensor, residual: torch.Tensor, **_: Any) -> Any:
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        biases = (slopes.to(key.device) * attention.positions).to(key.dtype).float()
        attended = attention.biased(query, key, value, biases, module.inv_norm_factor)
        return module.dense(attended.flatten(2)) + residual, None

    attention.instead_of("forward", forward)


def _falcon(module: Any, attention: _Attention) -> None:
    """Rotary embeddings and shared keys, or linear biases, which are rounded to bfloat16."""
    slopes = _slopes(module, module.num_heads).bfloat16()
    turn = _beside(module, "apply_rotary_pos_emb")
    scaling = module.inv_norm_factor

    def forward(hidden_states: torch.Tensor, alibi: Any, attention_mask: Any, **options: Any) -> Any:
        query, key, value = module._split_heads(module.query_key_value(hidden_states))
        if module.new_decoder_architecture:  # keys come repeated for the heads that share them
            group = module.num_heads // module.num_kv_heads
            key, value = key[:, :, ::group], value[:, :, ::group]
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if alibi is None:
            query, key = turn(query, key, *options["position_embeddings"])
            attended = attention(query, key, value, attention_mask, scaling)
        else:
            biases = (slopes.to(key.device) * attention.positions).to(key.dtype) * scaling
            attended = attention.biased(query, key, value, biases.float(), scaling)
        return module.dense(attended.flatten(2)), None

    attention.instead_of("forward", forward)


def _mpt(module: Any, attention: _Attention) -> None:
    """Linear biases in float32, and projections that may be clipped."""
    ends = _beside(module, "build_mpt_alibi_tensor")(module.n_heads, 2)[:, 0]
    slopes = ends[:, 1:] - ends[:, :1]

    def forward(hidden_states: torch.Tensor, **_: Any) -> Any:
        fused = module.Wqkv(hidden_states)
        if module.clip_qkv:
            fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        query, key, value = fused.unflatten(2, (3, module.n_heads, -1)).permute(2, 0, 3, 1, 4)
        biases = slopes.to(fused.device) * attention.positions
        attended = attention.biased(query, key, value, biases, module.softmax_scale)
        return module.out_proj(attended.flatten(2)), None

    attention.instead_of("forward", forward)


def _mask_is_needed(module: Any, attention: _Attention) -> None:
    """Models that convert their mask, although none is made for this implementation (MPT)."""

    def give_mask(_: Any, arguments: Any, options: dict[str, Any]) -> Any:
        if attention.replaces and options.get("attention_mask") is None:
            options["attention_mask"] = torch.zeros(1, 1, 1, 1, device=module.device)
        return arguments, options

    module.register_forward_pre_hook(give_mask, with_kwargs=True)


def _separate(module: Any, attention: _Attention) -> None:
    """Modules without the output projection (BERT's older copies)."""

    def forward(hidden_states: torch.Tensor, attention_mask: Any = None, *_: Any, **__: Any) -> Any:
        query, key, value = (
            each(hidden_states).unflatten(2, (module.num_attention_heads, -1)).transpose(1, 2)
            for each in (module.query, module.key, module.value)
        )
        scaling = module.attention_head_size**-0.5
        return attention(query, key, value, attention_mask, scaling).flatten(2), None

    attention.instead_of("forward", forward)


def _scaled_first(module: Any, attention: _Attention) -> None:
    """Modules that scale queries before they are cut into heads (XGLM)."""

    def forward(hidden_states: torch.Tensor, attention_mask: Any = None, **_: Any) -> Any:
        projections = (module.q_proj, module.k_proj, module.v_proj)
        query, key, value = (
            each(hidden_states).unflatten(2, (module.num_heads, -1)).transpose(1, 2) for each in projections
        )
        attended = attention(query * module.scaling, key, value, attention_mask, 1.0)
        return module.out_proj(attended.flatten(2)), None

    attention.instead_of("forward", forward)


def _kind_of(module: Any) -> Callable[[Any, _Attention], None] | None:
    """What makes a module call the attention function; None for one of no kind."""
    home = type(module).__module__.split(".")
    own = home[:2] == ["transformers", "models"] and len(home) > 2
    return KINDS.get(f"{home[2]}.{type(module).__name__}") if own else None


def _beside(module: Any, name: str) -> Any:
    """Something of the file that has a module's class."""
    return vars(sys.modules[type(module).__module__])[name]


def _slopes(module: Any, num_heads: int) -> torch.Tensor:
    """[heads, 1] differences of linear biases between two neighbouring keys."""
    biases = _beside(module, "build_alibi_tensor")(torch.ones(1, 2), num_heads, torch.float32)
    slopes: torch.Tensor = biases[:, 0, 1:]
    return slopes


KINDS: dict[str, Callable[[Any, _Attention], None]] = {
    "openai.Attention": _inner_by_columns,
    "bloom.BloomAttention": _bloom,
    "codegen.CodeGenAttention": _inner,
    "falcon.FalconAttention": _falcon,
    "gptj.GPTJAttention": _inner,
    "gpt_neo.GPTNeoSelfAttention": _inner,
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": _inner,
    "megatron_bert.MegatronBertSelfAttention": _separate,
    "mpt.MptAttention": _mpt,
    "mpt.MptModel": _mask_is_needed,
    "rembert.RemBertSelfAttention": _separate,
    "xglm.XGLMAttention": _scaled_first,
}
"""Family and class of transformers -> what makes its modules call the attention function."""
