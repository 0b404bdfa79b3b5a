"""Writes checkpoints as GGUF files, and what is left of their weights.

Names, orders and values are those of llama.cpp's converter."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file, save_file

from tests.engine.model.gguf.k_quants import k_quantized

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Places of scales in blocks of types that the package does not write."""
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")

Numbers = np.ndarray[Any, Any]


class Writing:
    """One file, and the weights that are left."""

    def __init__(self, source: Path, kind: str, *, is_random: bool) -> None:
        self.config: dict[str, Any] = json.loads((source / "config.json").read_text())
        self.architecture = ARCHITECTURES[self.config["model_type"]]
        self._kind, self._is_random = kind, is_random
        stored = load_file(source / "model.safetensors")
        self._tensors = {name: each.float().numpy() for name, each in stored.items()}
        self._chance = np.random.default_rng(1)
        self.left: dict[str, torch.Tensor] = {}
        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        self._names = gguf.get_tensor_name_map(number, self.config["num_hidden_layers"])

    def write(self, path: Path, vocabulary: Callable[[GGUFWriter], None]) -> None:
        """Write the file; see :func:`write_gguf`."""
        writer = GGUFWriter(path, self.architecture)
        self._values(writer)
        vocabulary(writer)
        for name, stack in self._stacks().items():
            self._add(writer, name, stack)
        for name, tensor in self._tensors.items():
            if not EXPERT.fullmatch(name) and ".mlp.experts." not in name:
                self._add(writer, name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _values(self, writer: GGUFWriter) -> None:
        config = self.config
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if self.architecture == "llama":
            writer.add_rope_dimension_count(size)
        else:
            writer.add_key_length(size)
            writer.add_value_length(size)
        ropes = config["rope_parameters"]
        writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
        if self.architecture in ("gemma2", "gemma3", "gpt-oss"):
            writer.add_sliding_window(config["sliding_window"])
        if self.architecture == "gemma3":
            writer.add_sliding_window_pattern(2)
        if self.architecture == "gemma2":
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        if experts := config.get("num_experts") or config.get("num_local_experts"):
            writer.add_expert_count(experts)
            writer.add_expert_used_count(config["num_experts_per_tok"])
            width = config.get("moe_intermediate_size") or config["intermediate_size"]
            writer.add_expert_feed_forward_length(width)

    def _stacks(self) -> dict[str, Numbers]:
        """Experts of a layer side by side, by the name of one without its number."""
        stacks: dict[str, list[Numbers]] = {}
        for name in sorted(self._tensors, key=lambda each: [int(n) for n in re.findall(r"\d+", each)]):
            if found := EXPERT.fullmatch(name):
                stacks.setdefault(f"{found[1]}.{found[3]}.weight", []).append(self._tensors[name])
        return {name: np.stack(each) for name, each in stacks.items()} | self._stacks_of_gpt_oss()

    def _stacks_of_gpt_oss(self) -> dict[str, Numbers]:
        stacks = {}
        for name, tensor in self._tensors.items():
            begin, _, part = name.rpartition(".")
            if not name.startswith("model.layers.") or ".mlp.experts." not in name or EXPERT.fullmatch(name):
                continue
            kind = "bias" if part.endswith("_bias") else "weight"
            turned = tensor if kind == "bias" else tensor.swapaxes(1, 2)
            if part.startswith("gate_up"):
                stacks[f"{begin}.gate_proj.{kind}"] = turned[:, ::2]
                stacks[f"{begin}.up_proj.{kind}"] = turned[:, 1::2]
            else:
                stacks[f"{begin}.down_proj.{kind}"] = turned
        return stacks

    def _add(self, writer: GGUFWriter, name: str, tensor: Numbers) -> None:
        stem, _, end = name.rpartition(".")
        found = self._names.get_name(stem) or self._names.get_name(name)
        if name.endswith("self_attn.sinks"):
            found, end = f"blk.{name.split('.')[2]}.attn_sinks", "weight"
        assert found is not None, name
        is_matrix = tensor.ndim > 1 and end == "weight"
        stored = tensor
        if self.architecture == "llama" and re.search(r"[qk]_proj", name):
            stored = _turned(tensor, self._heads(name))
        if self.architecture.startswith("gemma") and name.endswith("norm.weight"):
            stored = tensor + 1
        written, back = self._rounded(stored, self._kind if is_matrix else "F32")
        kind = GGMLQuantizationType[self._kind] if is_matrix and self._kind not in ("F32", "F16") else None
        writer.add_tensor(f"{found}.{end}", written, raw_dtype=kind)
        if self.architecture == "llama" and re.search(r"[qk]_proj", name):
            back = _turned_back(back, self._heads(name))
        if self.architecture.startswith("gemma") and name.endswith("norm.weight"):
            back = back - 1
        self._keep(name, back)

    def _heads(self, name: str) -> int:
        return int(self.config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])

    def _rounded(self, tensor: Numbers, kind: str) -> tuple[Numbers, Numbers]:
        """What is written, and the numbers that it stands for."""
        number = GGMLQuantizationType[kind]
        tensor = np.ascontiguousarray(tensor, dtype=np.float32)
        if kind in HALVES:
            written = self._random(tensor, kind) if self._is_random else k_quantized(tensor, kind)
        elif kind in ("F32", "F16"):
            written = tensor.astype(np.float16 if kind == "F16" else np.float32)
        else:
            written = quants.quantize(tensor, number)
        return written, quants.dequantize(written, number).astype(np.float32)

    def _random(self, tensor: Numbers, kind: str) -> Numbers:
        """Blocks of any codes, whose numbers are about as large as the tensor's."""
        numbers, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        shape = (*tensor.shape[:-1], tensor.shape[-1] // numbers, size)
        blocks = self._chance.integers(0, 256, shape, dtype=np.uint8)
        scale = float(tensor.std()) / (1000 if kind == "Q6_K" else 400)
        for at in HALVES[kind]:
            blocks[..., at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), dtype=np.uint8)
        return blocks.reshape(*tensor.shape[:-1], -1)

    def _keep(self, name: str, numbers: Numbers) -> None:
        """Note the weights under the names that the checkpoint has."""
        begin, _, last = name.partition(".mlp.experts.")
        if not last:
            self.left[name] = torch.from_numpy(numbers.copy())
        elif self.architecture != "gpt-oss":
            for expert, matrix in enumerate(numbers):
                self.left[f"{begin}.mlp.experts.{expert}.{last}"] = torch.from_numpy(matrix.copy())
        else:
            self._keep_of_gpt_oss(f"{begin}.mlp.experts", last, torch.from_numpy(numbers.copy()))

    def _keep_of_gpt_oss(self, begin: str, last: str, numbers: torch.Tensor) -> None:
        part, _, kind = last.partition(".")
        end = "_bias" if kind == "bias" else ""
        turned = numbers if end else numbers.transpose(1, 2)
        if part == "down_proj":
            self.left[f"{begin}.down_proj{end}"] = turned.contiguous()
            return
        both = self.left.setdefault(
            f"{begin}.gate_up_proj{end}", torch.empty(*turned.shape[:-1], 2 * turned.shape[-1])
        )
        both[..., int(part == "up_proj") :: 2] = turned


def _turned(tensor: Numbers, heads: int) -> Numbers:
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _turned_back(tensor: Numbers, heads: int) -> Numbers:
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def letters(writer: GGUFWriter, size: int = 384) -> None:
    """A vocabulary of so many tokens: special ones, bytes, and pairs of letters."""
    alphabet = sorted(gguf.vocab.bytes_to_unicode().values()) if hasattr(gguf, "vocab") else []
    alphabet = alphabet or [chr(number) for number in range(256, 512)]
    special = ["<s>", "</s>", "<pad>"]
    tokens = [*special, *alphabet][:size]
    merges: list[str] = []
    for first in "abcdefghij":
        for second in "klmnopqrstu":
            if len(tokens) < size and f"{first}{second}" not in tokens:
                merges.append(f"{first} {second}")
                tokens.append(f"{first}{second}")
    tokens += [f"[PAD{number}]" for number in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def write_gguf(
    source: Path,
    path: Path,
    kind: str = "Q8_0",
    wide: Path | None = None,
    vocabulary: Callable[[GGUFWriter], None] = letters,
    *,
    is_random: bool = True,
) -> Path:
    """Write a checkpoint as a GGUF file with matrices of a kind.

    ``wide``: a directory for the checkpoint with what is left of its weights, in float32. ``is_random``:
    codes of K types are any, not those of the weights.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = Writing(source, kind, is_random=is_random)
    writing.write(path, vocabulary)
    if wide is not None:
        shutil.copytree(source, wide)
        save_file(
            {name: each.contiguous() for name, each in writing.left.items()},
            wide / "model.safetensors",
            {"format": "pt"},
        )
    return path
