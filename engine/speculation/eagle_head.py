"""EAGLE-3 head: a layer that predicts from inner rows of the served model.

Each of its positions has the rows that go into three layers of the served model, and the token behind it.
Its attention reads both, each behind a norm of its own. So queries, keys and values are a sum of two
products (Li et al. 2025): the first is a usual layer's (:attr:`EagleHead.model`), the other one is of the
token alone (:class:`engine.kernels.embedding.token_product.TokenProduct`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM

from engine.attention.base import IMPLEMENTATION, PLAN_KEYWORD, Int64s, paged_attention
from engine.attention.current_call import follow_calls
from engine.attention.own_attention import adapt
from engine.kernels.core import library
from engine.kernels.core.base_model import base_parts
from engine.kernels.embedding.token_product import TokenProduct
from engine.kernels.program import Program
from engine.model.checkpoint import CheckpointError, ModelInfo
from engine.model.probe import probe_layers
from engine.model.sharding.shard_weights import all_tensors
from engine.model.weight_files import OpenFile, open_weights
from engine.model.weights import LOADING, WHOLE_STAGE, LoadedModel
from engine.speculation.eagle_config import (
    EMBEDDING,
    FC,
    HEAD,
    OWN_LAYER,
    TO_TARGET,
    EagleConfig,
    read_eagle_config,
)

PROJECTIONS = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
"""Matrices of the layer with two inputs: the token's row, then the inner ones."""
TOKEN_NORM, INNER_NORM = "input_layernorm.weight", "hidden_norm.weight"
PREFIX = "model."
STAND_IN = 64
"""Rows of an output layer in whose place the served model's comes."""


class EagleHead:
    """Input of a head's layer, and what is handed on to its next pass."""

    def __init__(self, head: ModelInfo, info: ModelInfo, dtype: torch.dtype, *, is_cut: bool) -> None:
        """Reads the head that was found for the model ``info``.

        ``is_cut``: whether no worker has the whole vocabulary of that model. Then its embedding and output
        layer are read once more, where the head has none.

        Raises:
            CheckpointError: tensors are missing, or of another shape.
        """
        self._config = config = read_eagle_config(Path(head.directory))
        tensors = _tensors_in(head, dtype)
        if is_cut and not {EMBEDDING, HEAD} <= tensors.keys():
            tensors = _vocabulary_of(info, dtype) | tensors
        layer = _layer_of(tensors, config)
        self._inner = config.layers_of(info.num_layers)
        self._fc, self._eps = tensors[FC], float(config.layer.get("rms_norm_eps", 1e-6))
        inner_norms = (
            [f"fc_norm.{index}.weight" for index in range(len(self._inner))] if config.fc_norm else []
        )
        self._norms = [_named(tensors, name, config) for name in inner_norms]
        self._whole_norm = _named(tensors, "input_norm.weight", config) if config.norm_before_fc else None
        self._inner_norm, self._token_norm = layer.pop(INNER_NORM), layer.pop(TOKEN_NORM)
        self._embedding, self._output = tensors.get(EMBEDDING), tensors.get(HEAD)
        """Those of its own, or None."""
        self._shares_output = self._output is None
        self._served: Program | None = None
        self._targets: Int64s | None = None
        if (offsets := tensors.get(TO_TARGET)) is not None:
            self._targets = offsets.long().numpy() + np.arange(len(offsets))
            if self._targets.min() < 0 or self._targets.max() >= info.vocab_size:
                raise CheckpointError(
                    f"--speculative-config: {TO_TARGET} of {head.directory} leads to tokens beyond the "
                    f"{info.vocab_size} of {info.directory}"
                )
        of_token = []
        for name in PROJECTIONS:
            both = _named(layer, name, config)
            of_token.append(both[:, : config.hidden].contiguous())
            layer[name] = both[:, config.hidden :].contiguous()
        self._of_token = of_token
        self._final_norm = _named(tensors, "norm.weight", config)
        layer = {"norm.weight": self._final_norm} | {f"layers.0.{name}": each for name, each in layer.items()}
        self.model = _make_model(layer, self._inner_norm, self._output, config, info, dtype)

    def __repr__(self) -> str:
        return f"<EagleHead of layers {self._inner}>"

    def attach(self, program: Program, served: Program, model: LoadedModel) -> None:
        """See :meth:`.RowInput.attach`.

        Where the head has no embedding or output layer of its own, the served model's are read.
        """
        kernels, table = library.load(), self._embedding
        assert kernels is not None
        if table is None:
            base = getattr(model.module, model.module.base_model_prefix)
            table = getattr(base, base_parts(base)["embedding"]).weight.data
        if program.ends.tokens is None:
            program.ends.tokens = TokenProduct(kernels, table, self._token_norm, self._eps, self._of_token)
        program.ends.tokens.table = table
        if self._shares_output:
            own, whole = program.laid_out.packed.output, served.laid_out
            assert own is not None
            assert whole.packed.output is not None
            program.ends.share(whole.packed.output, own.output.norm, rounds=whole.sizes[0].rounds)
        self.model.module.model.embed_tokens.weight.data = table.new_empty(0)
        self._of_token, self._output = [], None  # they are laid out
        served.ends.inner, self._served = self._inner, served

    def prepare(self, program: Program, directory: Path, open_file: OpenFile) -> tuple[EagleHead, None]:
        """See :meth:`.RowInput.prepare`: a head is none of the model's weights."""
        return self, None

    def served_rows(self, num_tokens: int, wanted: Int64s) -> torch.Tensor:
        """See :meth:`.RowInput.served_rows`."""
        assert self._served is not None
        inner = [rows[wanted] for rows in self._served.ends.inner_rows(num_tokens)]
        if self._norms:
            inner = [self._norm(each, weight) for each, weight in zip(inner, self._norms, strict=True)]
        both = torch.cat(inner, dim=-1)
        if self._whole_norm is not None:
            both = self._norm(both, self._whole_norm)
        return torch.nn.functional.linear(both, self._fc)

    def join(self, ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See :meth:`.RowInput.join`: the program adds what the tokens give."""
        return self._norm(rows, self._inner_norm) if self._config.norm_before_residual else rows

    def result(self, stream: torch.Tensor) -> torch.Tensor:
        """See :meth:`.RowInput.result`."""
        return self._norm(stream, self._final_norm) if self._config.norm_output else stream

    def targets(self, tokens: list[int]) -> list[int]:
        """See :meth:`.RowInput.targets`."""
        if self._targets is None:
            return tokens
        found: list[int] = self._targets[tokens].tolist()
        return found

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(rows, weight.shape, weight, self._eps)


def _tensors_in(info: ModelInfo, dtype: torch.dtype, *names: str) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, without the prefix of a base model.

    ``names``: only these of them.
    """
    found = {}
    with open_weights(Path(info.directory), dtype) as files:
        for name, piece in all_tensors(files).items():
            if not names or name.removeprefix(PREFIX) in names:
                tensor = piece[:]
                found[name.removeprefix(PREFIX)] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return found


def _vocabulary_of(info: ModelInfo, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The embedding and the output layer of a model, which may be the same."""
    found = _tensors_in(info, dtype, EMBEDDING, HEAD)
    if EMBEDDING not in found:
        raise CheckpointError(f"--speculative-config: {info.directory} has no {PREFIX}{EMBEDDING}")
    return {HEAD: found[EMBEDDING]} | found


def _named(tensors: dict[str, torch.Tensor], name: str, config: EagleConfig) -> torch.Tensor:
    if name not in tensors:
        raise CheckpointError(f"--speculative-config: {config.directory} has no {name} of an EAGLE-3 head")
    return tensors[name]


def _layer_of(tensors: dict[str, torch.Tensor], config: EagleConfig) -> dict[str, torch.Tensor]:
    """Tensors of the head's layer, by their names inside of it."""
    prefix = next(each for each in OWN_LAYER if any(name.startswith(each) for name in tensors))
    layer = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    for name in (TOKEN_NORM, INNER_NORM, *PROJECTIONS):
        _named(layer, name, config)
    if (width := layer[PROJECTIONS[0]].shape[1]) != 2 * config.hidden:
        raise CheckpointError(
            f"--speculative-config: {PROJECTIONS[0]} of {config.directory} reads {width} numbers, and a head "
            f"of rows of {config.hidden} has {2 * config.hidden}"
        )
    return layer


def _make_model(
    layer: dict[str, torch.Tensor],
    inner_norm: torch.Tensor,
    output: torch.Tensor | None,
    config: EagleConfig,
    info: ModelInfo,
    dtype: torch.dtype,
) -> LoadedModel:
    """A model of one layer, without what it adds of the token behind a row."""
    outputs = STAND_IN if output is None else config.draft_vocab_size
    facts = config.layer | {
        "vocab_size": outputs,
        "num_hidden_layers": 1,
        "max_position_embeddings": max(
            info.context_length, int(config.layer.get("max_position_embeddings", 1))
        ),
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "layer_types": None,
    }
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    with LOADING, torch.random.fork_rng(devices=[]):  # a stand-in's numbers
        torch.manual_seed(0)
        made = CONFIG_MAPPING[config.model_type](**facts)
        module = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation=IMPLEMENTATION)
    module = module.eval().requires_grad_(False)
    if output is not None:
        module.lm_head.weight.data = output
    module.model.embed_tokens.weight = module.lm_head.weight  # rows are given instead
    if config.norm_before_residual:
        module.model.layers[0].input_layernorm = torch.nn.Identity()
    else:
        layer["layers.0.input_layernorm.weight"] = inner_norm
    missing, unknown = module.model.load_state_dict(layer, strict=False)
    if lacking := [name for name in missing if name != EMBEDDING]:
        raise CheckpointError(f"--speculative-config: {config.directory} has no {lacking[0]}")
    if unknown:
        raise CheckpointError(f"--speculative-config: {config.directory} has an unknown {unknown[0]}")
    follow_calls(module, PLAN_KEYWORD)
    adapt(module, IMPLEMENTATION)
    with torch.inference_mode():
        width, layers = probe_layers(module, "EAGLE-3 head", info.context_length, WHOLE_STAGE)
    return LoadedModel(
        module,
        layers,
        width,
        dtype,
        torch.device("cpu"),
        context_length=info.context_length,
    )
