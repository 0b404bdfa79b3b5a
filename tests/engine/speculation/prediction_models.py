"""Tiny checkpoints with a multi-token prediction layer, and what that layer predicts by torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from engine.speculation.prediction_names import NAMES, PredictionNames
from tests.engine.native_families import MIXTURES
from tests.engine.states.models import SHIPPED_FILES, make_servable_model
from tests.engine.tiny_models import save, widen

VOCAB = 4096


class PredictingModel:
    """A checkpoint with a prediction layer, and both parts as modules of transformers."""

    def __init__(self, directory: Path, family: str) -> None:
        self.directory = directory
        if family == "qwen3_next":
            make_servable_model(directory, family, torch.float32)
        else:
            config = MIXTURES[family]()
            config = type(config)(**(config.to_dict() | {"vocab_size": VOCAB, "eos_token_id": 0}))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            widen(model, 1)
            save(model, directory)
            for name in SHIPPED_FILES:
                shutil.copy(MODELS_DIRECTORY / SHIPPED_MODEL / name, directory)
        self.names: PredictionNames = NAMES[family]
        self.served: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self.layer, around = self._make_layer(directory.with_name(directory.name + "-layer"), family)
        self._token_norm, self._hidden_norm, self._join = around

    def _make_layer(self, directory: Path, family: str) -> tuple[Any, tuple[Any, Any, torch.Tensor]]:
        """Write the layer into the checkpoint."""
        config = AutoConfig.from_pretrained(self.directory)
        number, hidden = config.num_hidden_layers, config.hidden_size
        for name, value in self.names.config.items():
            setattr(config, name, value)
        layer = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        widen(layer, 2)
        layer.model.embed_tokens.weight.data = self.served.model.embed_tokens.weight.data.clone()
        layer.lm_head.weight.data = self.served.lm_head.weight.data.clone()
        save(layer, directory)
        path, chance = self.directory / "model.safetensors", torch.Generator().manual_seed(3)
        tensors, own = load_file(path), self.names.layer.format(number)
        for name, tensor in load_file(directory / "model.safetensors").items():
            if name.startswith("model.layers.0."):
                tensors[own + name.removeprefix("model.layers.0.")] = tensor
        parts = {role: name.format(number) for role, name in self.names.parts.items()}
        if parts["norm"] in tensors:  # that of the model
            layer.model.norm.weight.data = tensors[parts["norm"]].clone()
        tensors[parts["norm"]] = layer.model.norm.weight.data.clone()
        if family == "deepseek_v3":  # its checkpoint has copies, others share them
            tensors[f"{own}embed_tokens.weight"] = layer.model.embed_tokens.weight.data.clone()
            tensors[f"{own}shared_head.head.weight"] = layer.lm_head.weight.data.clone()
        norms = []
        for role in ("token_norm", "hidden_norm"):
            norm = type(layer.model.norm)(hidden, eps=config.rms_norm_eps)
            norm.weight.data = layer.model.norm.weight.data + 0.1 * torch.randn(hidden, generator=chance)
            tensors[parts[role]] = norm.weight.data.clone()
            norms.append(norm)
        join = torch.randn(hidden, 2 * hidden, generator=chance) / (2 * hidden) ** 0.5
        tensors[parts["join"]] = join
        save_file(tensors, path, metadata={"format": "pt"})
        return layer, (*norms, join)

    @torch.no_grad()
    def predictions(self, tokens: Sequence[int], count: int) -> list[int]:
        """Tokens predicted behind these, the newest of which the served model has not computed."""
        ids = torch.tensor(tokens)
        hidden = self.served.model(ids[None, :-1]).last_hidden_state[0]
        inputs, found = self._inputs(ids[1:], hidden, 0), []
        kept: list[torch.Tensor] = []
        hook = self.layer.model.norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        for _ in range(count):
            result = self.layer.model(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0, -1]
            found.append(int(self.layer.lm_head(result).argmax()))
            handed_on = kept[-1][0, -1] if self.names.first_sees_nothing else result
            row = self._inputs(torch.tensor(found[-1:]), handed_on[None], len(inputs))
            inputs = torch.cat([inputs, row])
        hook.remove()
        return found

    def _inputs(self, ids: torch.Tensor, hidden: torch.Tensor, start: int) -> torch.Tensor:
        tokens = self.served.model.embed_tokens(ids)
        if self.names.first_sees_nothing and start == 0:
            tokens[0] = 0.0
        both = torch.cat([self._token_norm(tokens), self._hidden_norm(hidden)], dim=-1)
        return torch.nn.functional.linear(both, self._join)
