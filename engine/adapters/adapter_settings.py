"""Settings of adapters in PEFT's format, checked before a model is loaded (no torch)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from coordinator.messages import AdapterSource
from engine.model.errors import CheckpointError, first_line
from engine.model.weight_digest import DIGEST_BYTES, BrokenWeights, whole_digest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases of B (lora_bias)",
    "modules_to_save": "layers that are trained whole (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "layer_replication": "replicated layers (layer_replication)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "arrow_config": "Arrow routing (arrow_config)",
    "velora_config": "VeLoRA (velora_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
    "kappa_tune_config": "KappaTune (kappa_tune_config)",
}
"""Settings of PEFT that ask for what has no kernels here, by field."""
DECIDING = (
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
)
"""Settings that decide what an adapter computes."""


class AdapterError(CheckpointError):
    """Refusal of an adapter; the message says what is wrong and what to do."""


def read_settings(path: Path) -> dict[str, Any]:
    """Settings of an adapter, as PEFT has written them.

    Raises:
        AdapterError: they cannot be read, or ask for what is not served.
    """
    try:
        found = json.loads((path / CONFIG).read_text())
    except FileNotFoundError as error:
        raise AdapterError(f"{path} is no adapter: it has no {CONFIG}") from error
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path / CONFIG} cannot be read: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise AdapterError(f"{path / CONFIG} is no JSON object")
    if (kind := found.get("peft_type")) != "LORA":
        raise AdapterError(f"{path} is an adapter of kind {kind}: only LORA is served")
    if found.get("bias", "none") != "none":
        raise AdapterError(f"{path} trains biases (bias is {found['bias']!r}): only 'none' is served")
    for field, name in REFUSED.items():
        if found.get(field):
            raise AdapterError(f"{path} uses {name}, which is not served: merge it into the model's weights")
    return found


def settled(source: AdapterSource) -> AdapterSource:
    """The same adapter at its absolute place, with its digest.

    Raises:
        AdapterError: it cannot be served, or is not the one that it was.
    """
    path = Path(source.path).expanduser().absolute()
    digest = digest_of(path, read_settings(path))
    if source.digest and digest != source.digest:
        raise AdapterError(
            f"the adapter in {path} is not the one that the mesh serves as {source.name}: give all hosts the "
            "same files, or start the whole mesh with the new ones"
        )
    return AdapterSource(source.name, str(path), digest)


def check_place(path: Path, allowed: str | None) -> None:
    """Refuse an adapter whose files are not in the directory that is allowed.

    Links are followed. None: any is allowed.

    Raises:
        AdapterError: they are elsewhere.
    """
    if allowed is None:
        return
    inside = Path(allowed).resolve()
    for each in (path, path / CONFIG, path / WEIGHTS):
        if not each.resolve().is_relative_to(inside):
            raise AdapterError(
                f"{path} is not in {allowed}: adapters are loaded from there only "
                "(--allowed-local-adapter-path)"
            )


def digest_of(path: Path, settings: Mapping[str, Any]) -> str:
    """Digest of all that decides what an adapter computes, in hexadecimal.

    Raises:
        AdapterError: its tensors cannot be read.
    """
    from blake3 import blake3

    try:
        of_tensors = whole_digest([path / WEIGHTS])
    except FileNotFoundError as error:
        raise AdapterError(f"{path} has no {WEIGHTS}") from error
    except (OSError, BrokenWeights) as error:
        raise AdapterError(f"{path / WEIGHTS} cannot be read: {first_line(error)}") from error
    deciding = {name: settings.get(name) for name in DECIDING}
    if isinstance(targets := deciding["target_modules"], list):  # a set, in any order
        deciding["target_modules"] = sorted(targets)
    text = json.dumps(deciding, sort_keys=True)
    return blake3(msgspec.json.encode((of_tensors, text))).hexdigest(DIGEST_BYTES)
