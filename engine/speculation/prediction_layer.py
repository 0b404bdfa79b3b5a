"""Multi-token prediction (MTP) layer of a checkpoint: read as a model of one layer.

It predicts the token after the next one, from the served model's result for a position and the token behind
it (DeepSeek-V3, section 2.2). transformers leaves such layers out, so their tensors get the names of the
first layer of a model of one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch

from engine.attention.base import Int64s
from engine.config import ModelConfig
from engine.kernels.other_weights import NativeWeights, kept_buffers
from engine.kernels.program import Program
from engine.model.checkpoint import CheckpointError, ModelInfo
from engine.model.expert_weights import ExpertShare
from engine.model.module_reading import ModuleReader
from engine.model.sharding.shard import WHOLE
from engine.model.sharding.shard_weights import all_tensors
from engine.model.tensors_again import read_again
from engine.model.weight_files import OpenFile, open_weights
from engine.model.weights import LoadedModel, load_model
from engine.speculation.prediction_names import EMBEDDING, HEAD, PredictionNames, names_of

STAND_IN = 64
"""Rows of an embedding and an output layer in whose place the served model's come."""


@dataclass(frozen=True)
class PredictionReader(ModuleReader):
    """Reads a checkpoint's prediction layer as a model of one layer."""

    shares: ClassVar[bool] = False
    """Whether the served model's embedding and output layer are used."""

    def read(self, device: torch.device, share: ExpertShare | None) -> Any:
        names, number = names_of(self.info)
        for name, value in names.config.items():
            setattr(self.config, name, value)
        with self._open_weights() as files:
            given = all_tensors(files)
            tensors = _renamed(given, names, number, self.info)
            if self.shares:
                self.config.vocab_size, self.config.pad_token_id = STAND_IN, None
                tensors |= {name: tensors[name][:STAND_IN] for name in (EMBEDDING, HEAD) if name in tensors}
            options = self._options(self.model_class, device)
            module, report = self.model_class.from_pretrained(None, state_dict=tensors, **options)
        self._check_report(report)
        return module


class SharingReader(PredictionReader):
    """Reads a prediction layer without its embedding and output layer."""

    shares = True


def _shares(info: ModelInfo, dtype: torch.dtype) -> bool:
    """Whether a checkpoint has no embedding and output layer for its prediction layer alone.

    New weights could change a copy that it has.
    """
    names, number = names_of(info)
    own = names.layer.format(number)
    with open_weights(Path(info.directory), dtype, None) as files:
        return not {f"{own}embed_tokens.weight", f"{own}shared_head.head.weight"} & all_tensors(files).keys()


def _renamed(given: dict[str, Any], names: PredictionNames, number: int, info: ModelInfo) -> dict[str, Any]:
    own, parts = names.layer.format(number), {role: name.format(number) for role, name in names.parts.items()}
    if lacking := sorted(name for name in parts.values() if name not in given):
        raise CheckpointError(
            f"--speculative-config: {info.directory} has no prediction layer: {lacking[0]} is missing "
            f"beside the {number} layers of its config.json"
        )
    around = {*parts.values(), f"{own}embed_tokens.weight", f"{own}shared_head.head.weight"}
    tensors = {
        f"model.layers.0.{name.removeprefix(own)}": tensor
        for name, tensor in given.items()
        if name.startswith(own) and name not in around
    }
    tensors["model.norm.weight"] = given[parts["norm"]]
    tensors[EMBEDDING] = given.get(f"{own}embed_tokens.weight", given[EMBEDDING])
    head = given.get(f"{own}shared_head.head.weight", given.get(HEAD))
    return tensors if head is None else tensors | {HEAD: head}


class PredictionInput:
    """Input of a prediction layer: the model's result for a position, the next token."""

    def __init__(self, info: ModelInfo, settings: ModelConfig, dtype: torch.dtype, *, is_cut: bool) -> None:
        """Reads the layer; :attr:`model` is to be computed without its embedding.

        ``is_cut``: whether no worker has the served model's whole vocabulary.

        Raises:
            CheckpointError: the checkpoint has none, or it cannot be computed.
        """
        alone = msgspec.structs.replace(info, has_states=False)
        self._info, self._settings = alone, settings
        self._shares = not is_cut and _shares(info, dtype)
        self._reader = SharingReader if self._shares else PredictionReader
        self.model: LoadedModel = load_model(
            alone, settings, dtype=dtype, device=torch.device("cpu"), reader_class=self._reader
        )
        self._served: tuple[Program, Any] | None = None
        """The served model's program and last norm."""
        with open_weights(Path(info.directory), dtype, None) as files:
            parts = self._parts_in(all_tensors(files))
        self._first_sees_nothing = names_of(info)[0].first_sees_nothing
        self._take(parts)

    def _parts_in(self, given: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Parts around the layer among a checkpoint's tensors, by role."""
        names, number = names_of(self._info)
        return {
            role: given[name.format(number)][:].to(self.model.dtype) for role, name in names.parts.items()
        }

    def _take(self, parts: dict[str, torch.Tensor]) -> None:
        """Use these parts, with the embedding and the norm that the layer's module has now."""
        base = getattr(self.model.module, self.model.module.base_model_prefix)
        self._embedding, self._last_norm = _as_it_is(base.embed_tokens), _as_it_is(base.norm)
        self._token_norm = self._norm(parts["token_norm"])
        self._hidden_norm = self._norm(parts["hidden_norm"])
        self._join = parts["join"]

    def __repr__(self) -> str:
        return f"<PredictionInput of {self._join.shape[0]} numbers>"

    def attach(self, program: Program, served: Program, model: LoadedModel) -> None:
        """See :meth:`.RowInput.attach`."""
        base = getattr(model.module, model.module.base_model_prefix)
        self._served = served, _as_it_is(base.norm)
        if self._shares:
            self._embedding = _as_it_is(base.embed_tokens)
            whole, own = served.laid_out, program.laid_out.packed.output
            assert own is not None
            assert whole.packed.output is not None
            program.ends.share(whole.packed.output, own.output.norm, rounds=whole.sizes[0].rounds)

    def served_rows(self, num_tokens: int, wanted: Int64s) -> torch.Tensor:
        """See :meth:`.RowInput.served_rows`."""
        assert self._served is not None
        program, norm = self._served
        result: torch.Tensor = norm(program.ends.rows(num_tokens)[wanted])
        return result

    def prepare(
        self, program: Program, directory: Path, open_file: OpenFile
    ) -> tuple[PredictionInput, NativeWeights]:
        """See :meth:`.RowInput.prepare`."""
        model, found, here = self.model, copy.copy(self), Path(self._info.directory)
        module = read_again(
            self._info, self._settings, model.dtype, WHOLE, directory, open_file,
            reader_class=self._reader,
        )  # fmt: skip
        with open_weights(here, model.dtype, None, directory, open_file) as files:
            parts = self._parts_in(all_tensors(files))
        tensors = dict(module.named_parameters(remove_duplicate=False)) | kept_buffers(module)
        weights = NativeWeights(model, program, tensors)
        found._take(parts)
        return found, weights

    def _norm(self, weight: torch.Tensor) -> Any:
        norm = copy.deepcopy(self._last_norm)
        norm.weight.data = weight
        return norm

    def join(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See :meth:`.RowInput.join`."""
        tokens = self._embedding(ids)
        if self._first_sees_nothing:
            tokens = tokens.masked_fill((positions == 0).unsqueeze(-1), 0.0)
        both = torch.cat([self._token_norm(tokens), self._hidden_norm(hidden)], dim=-1)
        return torch.nn.functional.linear(both, self._join)

    def result(self, stream: torch.Tensor) -> torch.Tensor:
        """See :meth:`.RowInput.result`."""
        return stream if self._first_sees_nothing else self._last_norm(stream)

    def targets(self, tokens: list[int]) -> list[int]:
        """See :meth:`.RowInput.targets`."""
        return tokens


def _as_it_is(module: Any) -> Any:
    """The module with the tensors that it has now, whatever takes their place."""
    found = copy.copy(module)
    found._parameters, found._buffers = dict(module._parameters), dict(module._buffers)
    return found
