#!/usr/bin/env python3
"""HTTP server around llama.cpp, for ``bench_peers.py``.

The Python of build/peers/llama.cpp runs it.

    build/peers/llama.cpp/bin/python examples/benchmarks/llama_cpp_server.py MODEL --port 8080 --threads 2

Serves a Llama, Qwen3 or Qwen3-MoE checkpoint in bfloat16: writes it in llama.cpp's format beside the model at
first use, quantised if asked for, then becomes ``llama_cpp_server.mjs``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""llama.cpp's names of transformers' model types."""
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
KINDS = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}

Array = np.ndarray[Any, Any]


def tensors(path: Path) -> Iterator[tuple[str, Array]]:
    """The tensors of a safetensors file in bfloat16, as their 16 bits."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
    block = np.memmap(path, np.uint8, "r", offset=start)
    for name, about in header.items():
        if name == "__metadata__":
            continue
        if about["dtype"] != "BF16":
            raise SystemExit(f"{path}: {name} is {about['dtype']}, only bfloat16 is served")
        first, last = about["data_offsets"]
        yield name, block[first:last].view(np.uint16).reshape(about["shape"])


def interleaved(weight: Array, heads: int) -> Array:
    """Rows of each head with the two of a rotation side by side.

    transformers has them in halves.
    """
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(model: Path, target: Path, kind: str) -> None:
    config = json.loads((model / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, architecture)
    add_sizes(writer, config)
    add_vocabulary(writer, config["vocab_size"])
    turned = {}
    if architecture == "llama":  # others keep transformers' halves
        turned = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stacks: dict[str, dict[int, Array]] = {}
    for name, weight in tensors(model / "model.safetensors"):
        path = name.removesuffix(".weight")
        if path in OUTSIDE:
            add(writer, OUTSIDE[path], weight, kind)
            continue
        _, _, number, part = path.split(".", 3)
        if found := EXPERT.fullmatch(part):
            stacks.setdefault(f"blk.{number}.ffn_{found[2]}_exps", {})[int(found[1])] = weight
            continue
        ours = LAYER[part]
        add(
            writer,
            f"blk.{number}.{ours}",
            interleaved(weight, turned[ours]) if ours in turned else weight,
            kind,
        )
    for name, experts in stacks.items():
        add(writer, name, np.stack([experts[expert] for expert in sorted(experts)]), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(config["rope_theta"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A vocabulary is asked for, and never used."""
    names = [f"<0x{number:02X}>" for number in range(256)]
    names += [f"<{number}>" for number in range(256, size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * len(names))
    writer.add_token_types([gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (len(names) - 256))


def add(writer: gguf.GGUFWriter, name: str, weight: Array, kind: str) -> None:
    """Norms and routers stay in float32, as llama.cpp's own converter leaves them."""
    floats = (weight.astype(np.uint32) << 16).view(np.float32)
    if weight.ndim == 1 or name.endswith("ffn_gate_inp"):
        writer.add_tensor(f"{name}.weight", floats)
    elif kind == "bf16":
        raw = np.ascontiguousarray(weight).view(np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=KINDS[kind])
    else:
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(floats, KINDS[kind]), raw_dtype=KINDS[kind])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="a directory")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, default=2048, help="tokens of one (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=1, help="at once (default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, default="bf16", help="of weights (default: %(default)s)")
    args = parser.parse_args()
    ending = "" if args.kind == "bf16" else f"-{args.kind}"
    path = args.model.parent / f"{args.model.name}{ending}.gguf"
    if not path.exists():
        partly = path.with_suffix(".partly")
        write_gguf(args.model, partly, args.kind)
        partly.rename(path)
    server = Path(__file__).with_suffix(".mjs")
    modules = Path(sys.prefix) / "node_modules"
    numbers = [str(number) for number in (args.port, args.threads, args.context, args.sequences)]
    os.execvp("node", ["node", str(server), str(modules), str(path), *numbers])


if __name__ == "__main__":
    main()
