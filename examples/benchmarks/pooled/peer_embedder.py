#!/usr/bin/env python3
"""Embeddings by vLLM or llama.cpp, for ``bench_pooled.py``, which starts this with the peer's own Python.

    PEERS/vllm/bin/python peer_embedder.py vllm MODEL THREADS
    PEERS/llama.cpp/bin/python peer_embedder.py llama.cpp MODEL THREADS

Reads a list of token ids for each text from a line of JSON, and answers with a line: normalised vectors in
float32, as base64. llama.cpp gets a BERT in its own format, in float32.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

BERT = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
"""Parts of a layer, and llama.cpp's names of them."""
OUTSIDE = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}


def with_vllm(model: Path, threads: int) -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{os.cpu_count() - threads}-{os.cpu_count() - 1}"  # type: ignore[operator]
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its log
    from vllm import LLM

    llm = LLM(str(model), runner="pooling", dtype="float32", max_model_len=512, max_num_batched_tokens=2048)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        prompts: Any = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        found = llm.embed(prompts, use_tqdm=False)
        vectors = np.array([each.outputs.embedding for each in found], dtype=np.float32)
        print(base64.b64encode(vectors.tobytes()).decode(), file=out, flush=True)


def with_llama_cpp(model: Path, threads: int) -> None:
    path = model / "model.gguf"
    write_gguf(model, path)
    script = Path(__file__).with_name("llama_cpp_embedder.mjs")
    modules = Path(sys.prefix) / "node_modules"
    os.execvp("node", ["node", str(script), str(modules), str(path), str(threads)])


def write_gguf(model: Path, target: Path) -> None:
    import gguf

    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "bert")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(4, config["vocab_size"]))]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(words) - 4))
    writer.add_token_type_count(config["type_vocab_size"])
    for number, add in enumerate(
        (writer.add_pad_token_id, writer.add_unk_token_id, writer.add_bos_token_id, writer.add_sep_token_id)
    ):
        add(number)
    for name, weight in tensors(model / "model.safetensors"):
        path, _, last = name.rpartition(".")
        if path in OUTSIDE:
            writer.add_tensor(f"{OUTSIDE[path]}.{last}", weight)
        elif path.startswith("encoder.layer."):
            _, _, layer, part = path.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{BERT[part]}.{last}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(path: Path) -> Any:
    """Tensors of a safetensors file in float32."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        block = np.frombuffer(file.read(), np.uint8)
    for name, about in header.items():
        if name != "__metadata__":
            first, last = about["data_offsets"]
            yield name, block[first:last].view(np.float32).reshape(about["shape"])


if __name__ == "__main__":
    made = {"vllm": with_vllm, "llama.cpp": with_llama_cpp}[sys.argv[1]]
    made(Path(sys.argv[2]), int(sys.argv[3]))
