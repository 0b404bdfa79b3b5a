"""Tiny checkpoints with random weights of the families that are served as pooling models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 514, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2,
}  # fmt: skip
DECODER = SMALL | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192}
DISTIL = {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", SMALL),
    "roberta": ("roberta", SMALL),
    "xlm-roberta": ("xlm-roberta", SMALL),
    "camembert": ("camembert", SMALL),
    "distilbert": ("distilbert", SMALL | DISTIL),
    "albert": ("albert", SMALL | {"embedding_size": 32}),
    "electra": ("electra", SMALL | {"embedding_size": 32}),
    "mpnet": ("mpnet", SMALL),
    "deberta-v2": (
        "deberta-v2",
        SMALL | {"pos_att_type": ["p2c", "c2p"], "relative_attention": True, "type_vocab_size": 0},
    ),
    "modernbert": (
        "modernbert",
        SMALL | {"num_hidden_layers": 4, "local_attention": 16, "max_position_embeddings": 8192,
                 "cls_token_id": 0, "sep_token_id": 2},
    ),
    "gte": ("gte", SMALL | {"max_position_embeddings": 8192}),
    "nomic_bert": ("nomic_bert", SMALL | {"max_position_embeddings": 8192}),
    "jina_embeddings_v3": ("jina_embeddings_v3", SMALL | {"max_position_embeddings": 8192}),
    "eurobert": ("eurobert", DECODER),
    "qwen3": ("qwen3", DECODER),
    "mistral": ("mistral", DECODER | {"sliding_window": None}),
    "gemma3": (
        "gemma3_text",
        DECODER | {"use_bidirectional_attention": True, "sliding_window": 16, "query_pre_attn_scalar": 16},
    ),
}  # fmt: skip
"""Model type and settings of each shape, by its name."""
DECODERS = ("qwen3", "mistral", "gemma3")


def make_checkpoint(directory: Path, shape: str, task: str = "", **more: Any) -> Path:
    """Write a checkpoint; ``task``: the end of a class of transformers."""
    kind, settings = SHAPES[shape]
    config = transformers.AutoConfig.for_model(kind, **(settings | more))
    torch.manual_seed(len(shape))
    module = getattr(transformers, f"AutoModel{task}").from_config(config)
    with torch.no_grad():
        for part in module.parameters():  # far from where all tokens look alike
            part.add_(torch.randn_like(part) * 0.05)
    module.save_pretrained(directory)
    return directory


def add_sentence_files(
    directory: Path, pooling: str, *, normalizes: bool, dense: int = 0, dimensions: int = 64
) -> None:
    """Write the files of sentence-transformers."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modules += [("Dense", "2_Dense")] * bool(dense) + [("Normalize", "3_Normalize")] * normalizes
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    modes = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    mode = {"word_embedding_dimension": dimensions, f"pooling_mode_{modes[pooling]}": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    if dense:
        from safetensors.torch import save_file

        (directory / "2_Dense").mkdir()
        config = {"in_features": 64, "out_features": dense, "bias": True}
        config["activation_function"] = "torch.nn.modules.activation.Tanh"  # type: ignore[assignment]
        (directory / "2_Dense" / "config.json").write_text(json.dumps(config))
        weights = {"linear.weight": torch.randn(dense, 64) / 8, "linear.bias": torch.randn(dense)}
        save_file(weights, directory / "2_Dense" / "model.safetensors")
