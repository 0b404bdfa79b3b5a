"""Reading of a checkpoint's tensors into a transformers module: all, one shard's, or random ones.

Every tensor that the model needs must be there, in its shape, and no others.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import accelerate

from engine.attention.base import IMPLEMENTATION
from engine.attention.own_attention import first_implementation
from engine.config import ModelConfig
from engine.model.checkpoint import CheckpointError, ModelInfo, format_of_weights
from engine.model.expert_weights import ExpertShare, only_experts_of
from engine.model.quantization.attached import attach_codes
from engine.model.sharding.shard import ShardedClass
from engine.model.sharding.shard_weights import all_tensors, random_shard, read_shard
from engine.model.text_parts import NAMES, OTHER_MODALITIES
from engine.model.weight_files import MAPPED, OpenFile, open_weights
from engine.model.weight_set import is_laid_out_as_usual

HARMLESS_TENSORS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
"""Buffers that old versions of transformers saved and the model computes by itself."""

PREDICTION = re.compile(r"(^|\.)mtp(_\w+)?\.|(^|\.)layers\.(?P<layer>\d+)\.")
"""Tensors of multi-token prediction: by name, or in layers behind the model's last."""


@dataclass(frozen=True)
class ModuleReader:
    """Reads modules of one checkpoint, whole or in shards."""

    info: ModelInfo
    settings: ModelConfig
    model_class: Any
    """Class of transformers for the whole model."""
    config: Any
    is_part: bool
    """Whether it is the language part of a larger model."""
    dtype: torch.dtype
    source: Path | None = None
    """Another directory that has the weights; None: that of the checkpoint."""
    open_file: OpenFile = MAPPED

    @property
    def is_dummy(self) -> bool:
        """Whether weights are drawn at random."""
        return self.settings.load_format == "dummy"

    @property
    def is_quantised(self) -> bool:
        """Whether the checkpoint has codes, or weights are rounded to codes while they are read."""
        return self.settings.online is not None or format_of_weights(Path(self.info.directory)) is not None

    def make_dummy(self, device: torch.device) -> Any:
        """Make a module of random weights on a device.

        A host would take minutes for those of a large model, and hold them all.
        """
        there = contextlib.nullcontext() if device.type == "cpu" else device
        devices = [device] if device.type == "cuda" else []
        with there, torch.random.fork_rng(devices=devices):  # all instances make the same weights
            torch.manual_seed(0)
            options = {
                "dtype": self.dtype,
                "attn_implementation": first_implementation(self.model_class, IMPLEMENTATION),
            }
            if self.model_class is AutoModelForCausalLM:
                return self.model_class.from_config(self.config, trust_remote_code=True, **options)
            return self.model_class._from_config(self.config, **options)

    def read(self, device: torch.device, share: ExpertShare | None) -> Any:
        """Read the whole model to a device; with ``share`` without others' experts."""
        options, info = self._options(self.model_class, device), self.info
        directory = Path(info.directory)
        finds_files = is_laid_out_as_usual(directory) or self.model_class is AutoModelForCausalLM
        if share is None and not self.is_quantised and finds_files and self.source is None:
            with _straight_to(device):
                module, report = self.model_class.from_pretrained(
                    info.directory, use_safetensors=True, local_files_only=True, **options
                )
            self._check_report(report)
            return module
        with self._open_weights() as files, _straight_to(device):
            if share is not None:
                with only_experts_of(self.model_class, self.config, share, files) as tensors:
                    module, report = self.model_class.from_pretrained(None, state_dict=tensors, **options)
            else:
                tensors = all_tensors(files)
                module, report = self.model_class.from_pretrained(None, state_dict=tensors, **options)
        self._check_report(report)
        attach_codes(module, files, options.get("key_mapping"))
        return module

    def read_shard(self, sharded: ShardedClass, device: torch.device) -> Any:
        """Read one shard of the model to a device."""
        options = self._options(sharded.model_class, device)
        if self.is_dummy:
            with _straight_to(device):
                tensors = random_shard(sharded)
                module, _ = sharded.model_class.from_pretrained(None, state_dict=tensors, **options)
            return module
        with self._open_weights() as files:
            tensors = read_shard(sharded, files, options.get("key_mapping"), device)
        with _straight_to(device):
            module, report = sharded.model_class.from_pretrained(None, state_dict=tensors, **options)
        self._check_report(report)
        attach_codes(module, files, options.get("key_mapping"))
        return module

    def _open_weights(self) -> AbstractContextManager[list[Any]]:
        directory, online = Path(self.info.directory), self.settings.online
        return open_weights(directory, self.dtype, online, self.source, self.open_file)

    def _options(self, model_class: Any, device: torch.device) -> dict[str, Any]:
        """Arguments of ``from_pretrained``."""
        options: dict[str, Any] = {"trust_remote_code": True} if model_class is AutoModelForCausalLM else {}
        if device.type != "cpu":
            options["device_map"] = {"": device}
        if self.is_part:
            options["key_mapping"] = NAMES
        options["ignore_mismatched_sizes"] = True  # _check_report names them; transformers would not
        return options | {
            "config": self.config,
            "dtype": self.dtype,
            "attn_implementation": first_implementation(model_class, IMPLEMENTATION),
            "output_loading_info": True,
        }

    def _predicts_further(self, name: str) -> bool:
        """Whether a tensor only serves to predict several tokens at once, which is not used."""
        found = PREDICTION.search(name)
        layers = getattr(self.config, "num_hidden_layers", None)
        if found is None or found["layer"] is None or layers is None:
            return found is not None and found["layer"] is None
        return int(found["layer"]) >= int(layers)

    def _check_report(self, report: dict[str, Any]) -> None:
        """Refuse missing tensors, those of another shape, and those that the model does not know."""
        directory = self.source or self.info.directory
        if other := sorted(report["mismatched_keys"], key=str):
            name, found, wanted = other[0]
            raise CheckpointError(
                f"{self.info.architecture}: {directory} has {len(other)} tensor(s) of another "
                f"shape than its config.json says: {name} is {list(found)}, not {list(wanted)}"
            )
        unexpected = [
            key
            for key in report["unexpected_keys"]
            if not HARMLESS_TENSORS.search(key) and not self._predicts_further(key)
        ]
        if self.is_part:
            unexpected = [key for key in unexpected if not OTHER_MODALITIES.search(key)]
        for keys, problem in (
            (report["missing_keys"], "lacks {} tensor(s) that this model needs"),
            (unexpected, "has {} tensor(s) that this model does not know"),
        ):
            if keys:
                names = ", ".join(sorted(keys)[:3]) + (" ..." if len(keys) > 3 else "")
                raise CheckpointError(
                    f"{self.info.architecture}: {directory} {problem.format(len(keys))}: {names}"
                )


@contextlib.contextmanager
def _straight_to(device: torch.device) -> Iterator[None]:
    """Let transformers read tensor by tensor to one device other than the CPU.

    It asks for the package accelerate then, and needs it only for several devices.
    """
    with contextlib.ExitStack() as undo:
        if device.type != "cpu":
            before = accelerate.is_accelerate_available
            undo.callback(setattr, accelerate, "is_accelerate_available", before)
            accelerate.is_accelerate_available = lambda: True
        yield
