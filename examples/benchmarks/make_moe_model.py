#!/usr/bin/env python3
"""Make a mixture-of-experts model with random weights, for measurements: 16 experts, 61 M parameters.

    python examples/benchmarks/make_moe_model.py build/models/moe-16
    serve build/models/moe-16 -dp 2 -ep

Qwen3-MoE in bfloat16, with the tokenizer of the shipped model. It computes as a trained model of its shape
would, and says nothing. The same seed gives the same weights.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def make(
    directory: Path, *, layers: int, hidden: int, experts: int, top_k: int, width: int, seed: int
) -> int:
    """Write the model; returns its number of parameters. ``width``: of one expert."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    shipped = MODELS_DIRECTORY / SHIPPED_MODEL
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        intermediate_size=2 * hidden,
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            # Wide enough that the likeliest token is clear: the usual 0.02 makes all nearly equal.
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                scale = 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=random) * scale)
    model.to(torch.bfloat16).save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copy(shipped / name, directory)
    return sum(weight.numel() for weight in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("directory", type=Path, help="where to write it")
    add("--layers", type=int, default=8, help="(default: %(default)s)")
    add("--hidden", type=int, default=512, help="a multiple of 128 (default: %(default)s)")
    add("--experts", type=int, default=16, help="(default: %(default)s)")
    add("--top-k", type=int, default=4, help="experts per token (default: %(default)s)")
    add("--width", type=int, default=256, help="of one expert (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    args = vars(parser.parse_args())
    if args["hidden"] < 128 or args["hidden"] % 128:
        parser.error("--hidden must be a multiple of 128")
    print(f"{make(**args) / 1e6:.1f} M parameters -> {args['directory']}")


if __name__ == "__main__":
    main()
