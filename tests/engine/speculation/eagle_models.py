"""Random EAGLE-3 heads in both formats, and what they predict by torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

HEADS, KV_HEADS, DIM, MIDDLE = 4, 2, 16, 96
THETA, EPS = 10000.0, 1e-5


class RandomHead:
    """A head of random weights, written for a model, and the same in plain torch."""

    def __init__(self, directory: Path, served: Path, form: str, **changes: Any) -> None:
        """``form``: ``speculators`` or ``eagle``. ``changes``: of its configuration."""
        self.directory = directory
        self.served: Any = AutoModelForCausalLM.from_pretrained(
            served, dtype=torch.float32, attn_implementation="eager"
        )
        config = self.served.config
        self._hidden, self._is_speculators = config.hidden_size, form == "speculators"
        tokens = changes.pop("draft_vocab_size", config.vocab_size)
        self._inner = changes.get("eagle_aux_hidden_state_layer_ids") or (
            2,
            config.num_hidden_layers // 2,
            config.num_hidden_layers - 3,
        )
        self._changes = changes
        own = changes.pop("own_embedding", False), changes.pop("own_output", True)
        self.tensors = self._draw(tokens, *own)
        self._write(config, tokens)

    def _draw(self, tokens: int, own_embedding: bool, own_output: bool) -> dict[str, torch.Tensor]:
        chance, hidden = torch.Generator().manual_seed(5), self._hidden

        def matrix(outputs: int, inputs: int) -> torch.Tensor:
            return torch.randn(outputs, inputs, generator=chance) / inputs**0.5

        def norm() -> torch.Tensor:
            return 1 + 0.1 * torch.randn(hidden, generator=chance)

        layer = {
            "self_attn.q_proj": matrix(HEADS * DIM, 2 * hidden),
            "self_attn.k_proj": matrix(KV_HEADS * DIM, 2 * hidden),
            "self_attn.v_proj": matrix(KV_HEADS * DIM, 2 * hidden),
            "self_attn.o_proj": matrix(hidden, HEADS * DIM),
            "mlp.gate_proj": matrix(MIDDLE, hidden),
            "mlp.up_proj": matrix(MIDDLE, hidden),
            "mlp.down_proj": matrix(hidden, MIDDLE),
            "input_layernorm": norm(),
            "hidden_norm": norm(),
            "post_attention_layernorm": norm(),
        }
        vocab_size = self.served.config.vocab_size
        prefix = "layers.0" if self._is_speculators else "midlayer"
        tensors = {f"{prefix}.{name}.weight": each for name, each in layer.items()}
        tensors |= {"fc.weight": matrix(hidden, len(self._inner) * hidden), "norm.weight": norm()}
        if own_output:
            tensors["lm_head.weight"] = matrix(tokens, hidden)
        if own_embedding:
            tensors["embed_tokens.weight"] = torch.randn(vocab_size, hidden, generator=chance)
        if tokens != vocab_size:
            chosen = torch.randperm(vocab_size, generator=chance)[:tokens].sort().values
            tensors["d2t"] = chosen - torch.arange(tokens)
            tensors["t2d"] = torch.isin(torch.arange(vocab_size), chosen)
        return tensors

    def _write(self, config: Any, tokens: int) -> None:
        layer = {
            "model_type": "llama",
            "hidden_size": self._hidden,
            "intermediate_size": MIDDLE,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "num_hidden_layers": 1,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "vocab_size": config.vocab_size,
            "max_position_embeddings": 2048,
        }
        more = {"draft_vocab_size": tokens, **self._changes}
        if self._is_speculators:
            found = {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "transformer_layer_config": layer,
                "speculators_config": {
                    "algorithm": "eagle3",
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
                },
                **more,
            }
        else:
            found = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **more}
        self.directory.mkdir(parents=True)
        (self.directory / "config.json").write_text(json.dumps(found))
        self.store(self.tensors)

    def store(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write these in place of the head's tensors."""
        save_file(tensors, self.directory / "model.safetensors", metadata={"format": "pt"})

    @torch.no_grad()
    def predictions(self, tokens: Sequence[int], count: int) -> list[int]:
        """Tokens predicted behind these, the newest of which the served model has not computed."""
        ids = torch.tensor(tokens)
        states = self.served.model(ids[None, :-1], output_hidden_states=True).hidden_states
        both = torch.cat([states[number][0] for number in self._inner], dim=-1)
        rows = functional.linear(both, self.tensors["fc.weight"])
        embedding = self.tensors.get("embed_tokens.weight", self.served.model.embed_tokens.weight)
        head = self.tensors.get("lm_head.weight", self.served.lm_head.weight)
        given, found = ids[1:], []
        for _ in range(count):
            stream = self._layer(rows, functional.embedding(given, embedding))[-1:]
            result = self._norm(stream, "norm")
            token = int(functional.linear(result, head).argmax())
            found.append(token + int(self.tensors["d2t"][token]) if "d2t" in self.tensors else token)
            rows = torch.cat([rows, result if self._changes.get("norm_output") else stream])
            given = torch.cat([given, torch.tensor(found[-1:])])
        return found

    def _layer(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        prefix = "layers.0" if self._is_speculators else "midlayer"

        def product(given: torch.Tensor, name: str) -> torch.Tensor:
            return functional.linear(given, self.tensors[f"{prefix}.{name}.weight"])

        normed = self._norm(rows, f"{prefix}.hidden_norm")
        if self._changes.get("norm_before_residual", self._is_speculators):
            rows = normed
        both = torch.cat([self._norm(tokens, f"{prefix}.input_layernorm"), normed], dim=-1)
        heads = {
            name: product(both, f"self_attn.{name}_proj").unflatten(-1, (-1, DIM)).transpose(0, 1)
            for name in "qkv"
        }
        queries, keys = _turned(heads["q"]), _turned(heads["k"])
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (keys, heads["v"]))
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        rows = rows + product(attended.transpose(0, 1).flatten(1), "self_attn.o_proj")
        normed = self._norm(rows, f"{prefix}.post_attention_layernorm")
        middle = functional.silu(product(normed, "mlp.gate_proj")) * product(normed, "mlp.up_proj")
        return rows + product(middle, "mlp.down_proj")

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(rows, rows.shape[-1:], self.tensors[f"{name}.weight"], EPS)


def _turned(heads: torch.Tensor) -> torch.Tensor:
    """Heads [heads, tokens, DIM] with rotary positions."""
    rates = THETA ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.arange(heads.shape[1])[:, None] * rates
    cos, sin = (each.repeat(1, 2) for each in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin
