#!/usr/bin/env python3
"""Makes the models of bench_peers.py: random weights in the shapes of real ones.

They have a tokenizer of their own.

    python examples/benchmarks/make_bench_models.py build/models dense-small moe-small

    dense-small   Llama, 32 M parameters
    dense-0.5b    Qwen3, 449 M parameters, tied embeddings
    moe-small     Qwen3-MoE, 90 M parameters, 16 experts, 4 per token
    gpt-oss-small GPT-OSS, 116 M parameters, 16 experts, 4 per token
    latent-small  DeepSeek-V2, 102 M parameters: latent attention, 16 experts, 4 per token, and a shared one
    dense-wide    the layers of dense-small, and the 151,936 tokens of Qwen's models
    qwen3-next-small  Qwen3-Next, 8 layers of 1,024: every fourth layer attention, 16 experts
    granite-h-small   Granite 4 H, 8 layers of 1,024: Mamba 2, every fourth layer attention; dense

They compute as trained models of their shape would, and say nothing. The same seed gives the same weights.
The tokenizer has 8192 entries and was trained on the sources of Python's standard library. Further tokens are
made up: words that no prompt has.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCABULARY = 8192
CONTEXT = 16384
CORPUS_BYTES = 8_000_000
SPECIAL = ["<s>", "</s>", "<pad>"]
MANY_TOKENS = 151_936
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 4096, "truncate": False}
NAMES = ("dense-small", "dense-0.5b", "moe-small", "gpt-oss-small", "latent-small", "dense-wide")
NAMES += ("qwen3-next-small", "granite-h-small")
RATES = ("A_log", "dt_bias")
"""Weights of recurrent states that keep the values that the library begins with."""
HYBRID: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 8, "tie_word_embeddings": False}
HYBRID |= {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 2}


def config_of(name: str) -> Any:
    """The shape of a model, as transformers describes it."""
    import transformers

    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    small: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    small |= {"num_key_value_heads": 4, "intermediate_size": 1408, "tie_word_embeddings": False}
    match name:
        case "dense-small":
            return transformers.LlamaConfig(**shared, **small)
        case "dense-wide":
            return transformers.LlamaConfig(**shared | small | {"vocab_size": MANY_TOKENS})
        case "dense-0.5b":
            return transformers.Qwen3Config(
                **shared,
                hidden_size=1024,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                intermediate_size=3072,
                tie_word_embeddings=True,
            )
        case "moe-small":
            return transformers.Qwen3MoeConfig(
                **shared,
                **small,
                head_dim=64,
                moe_intermediate_size=384,
                num_experts=16,
                num_experts_per_tok=4,
                norm_topk_prob=True,
                decoder_sparse_step=1,
                mlp_only_layers=[],
            )
        case "gpt-oss-small":
            return transformers.GptOssConfig(
                **shared | small | {"intermediate_size": 512},
                head_dim=64,
                sliding_window=128,
                num_local_experts=16,
                num_experts_per_tok=4,
                rope_parameters=YARN,
            )
        case "latent-small":
            return transformers.DeepseekV2Config(
                **shared | small | {"num_key_value_heads": 8},
                q_lora_rank=None,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                moe_intermediate_size=384,
                n_routed_experts=16,
                num_experts_per_tok=4,
                n_shared_experts=1,
                first_k_dense_replace=1,
                norm_topk_prob=False,
                topk_method="greedy",
                n_group=1,
                topk_group=1,
            )
        case "qwen3-next-small":
            return transformers.Qwen3NextConfig(
                **shared | HYBRID,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=128,
                linear_num_key_heads=8,
                linear_num_value_heads=16,
                moe_intermediate_size=384,
                shared_expert_intermediate_size=384,
                num_experts=16,
                num_experts_per_tok=4,
            )
        case "granite-h-small":
            return transformers.GraniteMoeHybridConfig(
                **shared | HYBRID,
                num_attention_heads=16,
                num_key_value_heads=4,
                shared_intermediate_size=2816,
                num_local_experts=0,
                mamba_n_heads=32,
                mamba_d_state=128,
                attention_multiplier=64**-0.5,
            )
    raise ValueError(f"unknown model {name!r}: {', '.join(NAMES)}")


def make(directory: Path, name: str, seed: int = 0) -> int:
    """Write the model; returns its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(name)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, weight in sorted(model.named_parameters()):
            if weight.ndim == 1:
                if not path.endswith(RATES):
                    weight.fill_(1.0)
                continue
            # Wide enough that the likeliest token is clear: the usual 0.02 makes all nearly equal.
            # Tied embeddings are output weights, too.
            wide = "embed_tokens" in path and not config.tie_word_embeddings
            scale = 1.0 if wide else weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=random) * scale)
    model.to(torch.bfloat16).save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)
    for_older_readers(directory / "config.json")
    return sum(weight.numel() for weight in model.parameters())


def write_tokenizer(directory: Path, num_tokens: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    written = json.loads(tokenizer.to_str())
    written["model"]["vocab"] |= {f"\u0120word{number}": number for number in range(VOCABULARY, num_tokens)}
    (directory / "tokenizer.json").write_text(json.dumps(written))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    described |= dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    described["chat_template"] = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")


def corpus() -> Iterator[str]:
    """Python's standard library, as far as it is needed."""
    left = CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if left <= 0:
            return
        if "site-packages" not in path.parts:
            text = path.read_text("utf-8", errors="ignore")
            left -= len(text)
            yield text


def for_older_readers(path: Path) -> None:
    """Add the spellings of settings that other engines look for."""
    config = json.loads(path.read_text())
    config.setdefault("rope_theta", (config.get("rope_parameters") or {}).get("rope_theta", 10000.0))
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    path.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where to write them, a directory each")
    parser.add_argument("models", nargs="*", choices=[*NAMES, []], help="(default: all)")
    args = parser.parse_args()
    for name in args.models or NAMES:
        number = make(args.directory / name, name)
        print(f"{number / 1e6:.1f} M parameters -> {args.directory / name}", flush=True)


if __name__ == "__main__":
    main()
