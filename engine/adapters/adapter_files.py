"""Adapters in PEFT's format: their matrices, by the layers of a model.

PEFT itself says which layers of a model an adapter's settings name, and with which rank and scaling: it is
asked with a model without memory.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from coordinator.messages import AdapterSource
from engine.adapters.adapter_settings import WEIGHTS, AdapterError, settled
from engine.kernels.adapters.sites import LowRank
from engine.model.errors import first_line

logger = logging.getLogger(__name__)

PREFIX = "base_model.model."
"""Beginning of each tensor's name, as PEFT saves a wrapped model."""
WITHIN = ".base_layer"
"""End of the name of what another wrapper of PEFT is around."""


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter as its files have it."""

    rank: int
    """Its highest rank."""
    parts: Mapping[str, LowRank]
    """Its matrices by the name of their layer in the model."""


def read_adapter(source: AdapterSource, whole: Any, most_rank: int) -> Adapter:
    """Read an adapter for a model.

    ``whole``: a new model of the class that is served, on the meta device, which is changed.
    ``most_rank``: the highest rank that there is room for.

    Raises:
        AdapterError: it has no files, is cut off, is not for this model, or computes something else.
    """
    path = Path(settled(source).path)
    try:
        import_module("torch.distributed.tensor")  # which PEFT takes for granted, and is loaded late here
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
    except ImportError as error:
        raise AdapterError(
            f"adapters are read by the package peft, which cannot be loaded ({first_line(error)}): "
            f"pip install 'lockstep-mesh[lora]'"
        ) from error
    tensors = _tensors(path)
    try:
        settings = LoraConfig.from_pretrained(str(path))
        with warnings.catch_warnings():  # of patterns that it has made itself, for parameters
            warnings.filterwarnings("ignore", message=".*_pattern keys did not match")
            inject_adapter_in_model(settings, whole, "lora", low_cpu_mem_usage=True)
        # those of each expert are joined where the model has all experts in one tensor
        tensors = convert_peft_adapter_state_dict_for_transformers(whole, settings, tensors, "lora")
    except Exception as error:  # whatever PEFT finds wrong
        raise AdapterError(f"{path}: PEFT refuses it for this model: {first_line(error)}") from error
    layers = {name: layer for name, layer in whole.named_modules() if isinstance(layer, LoraLayer)}
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    parts = {_adapted(name, layer): _part(path, name, layer, tensors) for name, layer in layers.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not _is_copy(path, name, tensor, whole)}
    if tensors:
        raise AdapterError(
            f"{path} has {len(tensors)} tensors that belong to no layer of this model: {min(tensors)}"
        )
    rank = max(part.rank for part in parts.values())
    if rank > most_rank:
        raise AdapterError(f"{path} has rank {rank}: --max-lora-rank is {most_rank}")
    return Adapter(rank, parts)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found: dict[str, torch.Tensor] = load_file(path / WEIGHTS)
    except FileNotFoundError as error:
        raise AdapterError(f"{path} has no {WEIGHTS}") from error
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path / WEIGHTS} cannot be read: {first_line(error)}") from error
    return found


def _is_copy(path: Path, name: str, tensor: torch.Tensor, whole: Any) -> bool:
    """Whether a tensor is a frozen weight, saved beside the output layer's adapter."""
    embeddings = [whole.get_input_embeddings(), whole.get_output_embeddings()]
    found = {key.replace(f"{WITHIN}.", "."): part for key, part in whole.named_modules()}
    layer = found.get(name.replace(f"{WITHIN}.", ".").removesuffix(".weight"))
    if layer is None or all(layer is not each for each in embeddings) or layer.weight.shape != tensor.shape:
        return False
    logger.warning("%s has a copy of %s, which is ignored: the model's own is used", path, name)
    return True


def _part(path: Path, name: str, layer: Any, tensors: dict[str, torch.Tensor]) -> LowRank:
    """Matrices of one layer, which are taken out of ``tensors``."""
    base, experts = layer.get_base_layer(), getattr(layer, "num_experts", 1)
    of_tokens = isinstance(base, torch.nn.Embedding)
    if experts == 1 and not (of_tokens or isinstance(base, torch.nn.Linear)):
        raise AdapterError(
            f"{path} adapts {name}, of type {type(base).__name__}: no linear layer and no embedding"
        )
    found = []
    for matrix in ("lora_embedding_A", "lora_embedding_B") if of_tokens else ("lora_A", "lora_B"):
        made = getattr(layer, matrix)["lora"]
        tensor = tensors.pop(f"{name}.{matrix}" if of_tokens else f"{name}.{matrix}.weight", None)
        expected = tuple((made if of_tokens else made.weight).shape)
        if tensor is None:
            raise AdapterError(f"{path} lacks {matrix} of {name}")
        if tuple(tensor.shape) != expected:
            raise AdapterError(
                f"{path}: {matrix} of {name} is {list(tensor.shape)}, this model needs {list(expected)}: "
                f"is it an adapter of another model?"
            )
        if not tensor.isfinite().all():
            raise AdapterError(f"{path}: {matrix} of {name} has numbers that are not finite")
        found.append(tensor)
    a, b = found
    if experts > 1:  # see PEFT's ParamWrapper.get_delta_weight
        a = a.reshape(experts, -1, a.shape[1])
        b = b.reshape(len(b), -1, experts).permute(2, 0, 1)
    return LowRank(a, b, float(layer.scaling["lora"]), of_tokens)


def _adapted(name: str, layer: Any) -> str:
    """Name of the layer, or parameter, in the wrapper of this name."""
    parameter = getattr(layer, "parameter_name", "weight")
    while name.endswith(WITHIN):
        name = name.removesuffix(WITHIN)
    return name if parameter == "weight" else f"{name}.{parameter}"
