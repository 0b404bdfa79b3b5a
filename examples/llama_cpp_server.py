#!/usr/bin/env python3
"""llama.cpp's single stream behind HTTP, for ``bench_peers.py``: run by the Python of build/peers/llama.cpp.

    build/peers/llama.cpp/bin/python examples/llama_cpp_server.py build/models/dense-small --port 8080

Serves a Llama model of transformers' in bfloat16: writes it in llama.cpp's format beside the model at first
use, then answers streamed ``/v1/completions`` with token ids as prompts, greedily, one after the other. The
tokens that a prompt has in common with the sequence before it are not computed again. All computing is
llama.cpp's; this file is no more than a loop around ``llama_decode``. No text is made: ``text`` holds ids.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

CONTEXT = 2048
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


# ---- the file


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Of a safetensors file in bfloat16, as their 16 bits."""
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
    """Rows of each head so that the two of a rotation are neighbours: transformers has them in halves."""
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
    writer.add_tokenizer_model("none")
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


# ---- the stream


class Stream:
    """One sequence."""

    def __init__(self, path: Path, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = CONTEXT
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._held: list[int] = []
        """Tokens whose keys and values are there."""

    def answer(self, prompt: list[int], count: int) -> Iterator[int]:
        """Greedily. The prompt's last token is computed in any case."""
        common = 0
        while common < min(len(self._held), len(prompt) - 1) and self._held[common] == prompt[common]:
            common += 1
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, 0, common, -1)
        self._held = prompt[:common]
        new = prompt[common:]
        for number in range(count):
            token = self._step(new)
            yield token
            if number + 1 < count:
                new = [token]

    def _step(self, ids: list[int]) -> int:
        array = (llama_cpp.llama_token * len(ids))(*ids)
        if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(ids))):
            raise RuntimeError("llama_decode failed")
        self._held += ids
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(
            np.ctypeslib.as_array(
                ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab,)
            ).argmax()
        )


def handler(stream: Stream) -> type[BaseHTTPRequestHandler]:
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            prompt, count = body["prompt"], body["max_tokens"]
            with one_at_a_time:
                for token in stream.answer(prompt, count):
                    self._send({"choices": [{"index": 0, "text": f" {token}", "finish_reason": None}]})
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
            self._send({"choices": [], "usage": usage})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _send(self, event: dict[str, Any]) -> None:
            self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def log_message(self, *_: Any) -> None:
            """Nothing per request."""

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="a directory")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    path = args.model.parent / f"{args.model.name}.gguf"
    if not path.exists():
        partly = path.with_suffix(".partly")
        write_gguf(args.model, partly)
        partly.rename(path)
    stream = Stream(path, args.threads)
    list(stream.answer([5] * 16, 4))  # what is made at first use
    ThreadingHTTPServer(("127.0.0.1", args.port), handler(stream)).serve_forever()


if __name__ == "__main__":
    main()
