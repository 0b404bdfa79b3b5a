#!/usr/bin/env python3
"""HTTP server around llama.cpp's single stream, for ``bench_peers.py``.

The Python of build/peers/llama.cpp runs it.

    build/peers/llama.cpp/bin/python examples/benchmarks/llama_cpp_server.py MODEL --port 8080 --threads 2

Serves a Llama model of transformers' in bfloat16: writes it in llama.cpp's format beside the model at first
use, then becomes ``llama_cpp_server.mjs``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
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


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head with the two of a rotation side by side.

    transformers has them in halves.
    """
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(model: Path, target: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    names = [f"<0x{number:02X}>" for number in range(256)]  # a vocabulary is asked for, and never used
    names += [f"<{number}>" for number in range(256, config["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * len(names))
    writer.add_token_types([gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (len(names) - 256))
    for name, weight in tensors(model / "model.safetensors"):
        path = name.removesuffix(".weight")
        if path in OUTSIDE:
            new = OUTSIDE[path]
        else:
            _, _, number, part = path.split(".", 3)
            new = f"blk.{number}.{LAYER[part]}"
            if part.endswith("q_proj"):
                weight = interleaved(weight, heads)
            elif part.endswith("k_proj"):
                weight = interleaved(weight, kv_heads)
        if weight.ndim == 1:
            writer.add_tensor(f"{new}.weight", (weight.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(weight).view(np.uint8)
            writer.add_tensor(f"{new}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="a directory")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, default=2048, help="tokens (default: %(default)s)")
    args = parser.parse_args()
    path = args.model.parent / f"{args.model.name}.gguf"
    if not path.exists():
        partly = path.with_suffix(".partly")
        write_gguf(args.model, partly)
        partly.rename(path)
    server = Path(__file__).with_suffix(".mjs")
    modules = Path(sys.prefix) / "node_modules"
    numbers = [str(number) for number in (args.port, args.threads, args.context)]
    os.execvp("node", ["node", str(server), str(modules), str(path), *numbers])


if __name__ == "__main__":
    main()
