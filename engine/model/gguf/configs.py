"""A transformers config.json made from the metadata of a GGUF file (pure).

Keys are those of llama.cpp. What a file does not say is what llama.cpp supposes for the architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.model.gguf.reading import UNQUANTISED, GgufError, GgufHeader

METHOD = "gguf"
"""``quant_method`` of a config.json that was made from a file."""
FACTORS = "rope_freqs.weight"
"""Tensor of factors that Llama's rotary frequencies are divided by."""
SCALINGS = "none", "linear", "yarn"
"""Kinds of scaled rotary embeddings that are read."""
GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose queries are not scaled by the size of a head."""


class _Metadata:
    """Metadata values of one architecture in a GGUF file."""

    def __init__(self, header: GgufHeader) -> None:
        self.header, self._prefix = header, header.architecture

    def __contains__(self, name: str) -> bool:
        return f"{self._prefix}.{name}" in self.header.metadata

    def __getitem__(self, name: str) -> Any:
        key = f"{self._prefix}.{name}"
        if key not in self.header.metadata:
            raise GgufError(f"the file lacks {key}, without which its model is not known: get it again")
        return self.header.metadata[key]

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self._prefix}.{name}", default)

    def whole(self, name: str) -> int:
        """A whole number that is the same for all layers."""
        found = self[name]
        numbers = set(found) if isinstance(found, list) else {found}
        if len(numbers) != 1:
            raise GgufError(
                f"{self._prefix}.{name} is {found}: layers of several sizes are not read from GGUF files"
            )
        return int(numbers.pop())


def config_of(header: GgufHeader, factors: Sequence[float] = ()) -> dict[str, Any]:
    """The config.json of a file's model.

    ``factors``: numbers of :data:`FACTORS`, by which rotary frequencies are divided.

    Raises:
        GgufError: its architecture is not read, or it lacks a value.
    """
    make = ARCHITECTURES.get(header.architecture)
    if make is None:
        raise GgufError(
            f"the architecture {header.architecture} is not read from GGUF files: use a checkpoint with "
            f"*.safetensors, or a file of one of {', '.join(ARCHITECTURES)}"
        )
    values = _Metadata(header)
    if "token_embd.weight" not in header.tensors:
        raise GgufError("the file lacks token_embd.weight: get it again")
    config = _common(values) | make(values) | {"quantization_config": {"quant_method": METHOD}}
    if factors:  # Llama 3's scaling, as what follows from it; the same for all lengths
        config["rope_parameters"] |= {
            "rope_type": "longrope",
            "attention_factor": 1.0,
            "short_factor": list(factors),
            "long_factor": list(factors),
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    return {name: value for name, value in config.items() if value is not None}


def _common(values: _Metadata) -> dict[str, Any]:
    header, heads = values.header, values.whole("attention.head_count")
    hidden = values.whole("embedding_length")
    size = values.whole("attention.key_length") if "attention.key_length" in values else hidden // heads
    if "attention.value_length" in values and values.whole("attention.value_length") != size:
        raise GgufError("values of another size than keys are not read from GGUF files")
    ids = {
        name: header.metadata.get(f"tokenizer.ggml.{key}")
        for name, key in (
            ("bos_token_id", "bos_token_id"),
            ("eos_token_id", "eos_token_id"),
            ("pad_token_id", "padding_token_id"),
        )
    }
    return {
        "hidden_size": hidden,
        "num_hidden_layers": values.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": (
            values.whole("attention.head_count_kv") if "attention.head_count_kv" in values else heads
        ),
        "head_dim": size,
        "rms_norm_eps": values["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": values.whole("context_length"),
        "rope_parameters": {"rope_theta": values.get("rope.freq_base", 10000.0)} | _scaling(values),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        **ids,
    }


def _dtype(header: GgufHeader) -> str:
    """Data type of ``--dtype auto``: that of the matrices, bfloat16 for quantised ones."""
    kinds = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if not kinds <= set(UNQUANTISED) or "BF16" in kinds:
        return "bfloat16"
    return "float16" if "F16" in kinds else "float32"


def _scaling(values: _Metadata) -> dict[str, Any]:
    """Scaling of rotary embeddings, as config.json has it."""
    kind = str(values.get("rope.scaling.type", "none"))
    if kind not in SCALINGS:
        raise GgufError(f"rotary embeddings scaled by {kind} are not read from GGUF files")
    if kind == "none":
        return {"rope_type": "default"}
    found: dict[str, Any] = {"rope_type": kind, "factor": float(values["rope.scaling.factor"])}
    if kind == "yarn":
        original = values.get("rope.scaling.original_context_length") or values.whole("context_length")
        found["original_max_position_embeddings"] = int(original)
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if (given := values.get(f"rope.scaling.{theirs}")) is not None:
                found[ours] = float(given)
    return found


def _has(values: _Metadata, name: str) -> bool:
    return f"blk.0.{name}" in values.header.tensors


def _dense(kind: str, architecture: str) -> Callable[[_Metadata], dict[str, Any]]:
    def make(values: _Metadata) -> dict[str, Any]:
        return {
            "model_type": kind,
            "architectures": [architecture],
            "intermediate_size": values.whole("feed_forward_length"),
            "hidden_act": "silu",
        }

    return make


def _llama(values: _Metadata) -> dict[str, Any]:
    if values.get("expert_count"):
        raise GgufError("mixtures in the architecture llama (Mixtral) are not read from GGUF files")
    config = _dense("llama", "LlamaForCausalLM")(values)
    config["attention_bias"] = _has(values, "attn_output.bias")
    config["mlp_bias"] = _has(values, "ffn_down.bias")
    return config


def _qwen3_moe(values: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_act": "silu",
        "intermediate_size": int(values.get("feed_forward_length") or 0),
        "moe_intermediate_size": values.whole("expert_feed_forward_length"),
        "num_experts": values.whole("expert_count"),
        "num_experts_per_tok": values.whole("expert_used_count"),
        "norm_topk_prob": bool(values.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(kind: str, model_type: str, architecture: str) -> Callable[[_Metadata], dict[str, Any]]:
    def make(values: _Metadata) -> dict[str, Any]:
        heads, size = values.whole("attention.head_count"), values.whole("attention.key_length")
        is_largest = values.whole("block_count") == GEMMA_27B[kind]
        return {
            "model_type": model_type,
            "architectures": [architecture],
            "intermediate_size": values.whole("feed_forward_length"),
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": values.whole("embedding_length") // heads if is_largest else size,
            "sliding_window": values.whole("attention.sliding_window"),
            "attn_logit_softcapping": values.get("attn_logit_softcapping"),
            "final_logit_softcapping": values.get("final_logit_softcapping"),
        }

    return make


def _gemma3(values: _Metadata) -> dict[str, Any]:
    config = _gemma("gemma3", "gemma3_text", "Gemma3ForCausalLM")(values)
    every = int(values.get("attention.sliding_window_pattern") or 6)
    layers = range(1, values.whole("block_count") + 1)
    return config | {
        "layer_types": ["sliding_attention" if layer % every else "full_attention" for layer in layers],
        "rope_parameters": {
            "full_attention": _scaling(values) | {"rope_theta": values.get("rope.freq_base", 1e6)},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": values.get("rope.freq_base_swa", 10000.0),
            },
        },
    }


def _gpt_oss(values: _Metadata) -> dict[str, Any]:
    scaling = _scaling(values)
    if scaling["rope_type"] == "yarn":
        scaling = {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0} | scaling
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": values.whole("expert_feed_forward_length"),
        "num_local_experts": values.whole("expert_count"),
        "num_experts_per_tok": values.whole("expert_used_count"),
        "sliding_window": values.whole("attention.sliding_window"),
        "attention_bias": True,
        "rope_parameters": {"rope_theta": values.get("rope.freq_base", 150000.0)} | scaling,
    }


ARCHITECTURES: Mapping[str, Callable[[_Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _dense("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _dense("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma("gemma2", "gemma2", "Gemma2ForCausalLM"),
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
}
"""Makers of what is particular to an architecture, by llama.cpp's name of it."""
