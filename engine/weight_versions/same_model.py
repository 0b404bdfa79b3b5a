"""Checks by headers alone that new weights are of the served model (no torch)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.model.model_files import read_json
from engine.model.weight_digest import StoredTensor
from engine.weight_versions.contract import WeightsRefused

WITHOUT_MEANING = {
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "_attn_implementation", "auto_map",
}  # fmt: skip
"""Entries of config.json that decide nothing about what is computed with the weights."""
COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|^lm_head\.weight$")
"""Tensors that the model computes by itself, or shares: some writers leave them out."""
SHOWN = 3
"""Names that an error shows."""


def check_config(served: Path, directory: Path) -> None:
    """Check that a directory's config.json is that of the served model; it may have none.

    Raises:
        WeightsRefused: an entry differs.
    """
    if not (directory / "config.json").is_file():
        return
    before, after = read_json(served / "config.json"), read_json(directory / "config.json")
    for name in sorted((before.keys() | after.keys()) - WITHOUT_MEANING):
        if name not in before or name not in after:
            continue
        was, now = _meaning(before[name]), _meaning(after[name])
        if now != was:
            raise WeightsRefused(
                f"{directory}/config.json is of another model: {name} is {now!r}, not {was!r}"
            )
    if before.get("quantization_config") != after.get("quantization_config"):
        raise WeightsRefused(f"{directory}/config.json is of weights in another format")


def _meaning(value: Any) -> Any:
    """A value of config.json without what has no meaning."""
    if not isinstance(value, dict):
        return value
    return {name: _meaning(each) for name, each in value.items() if name not in WITHOUT_MEANING}


def check_tensors(before: Mapping[str, StoredTensor], after: Mapping[str, StoredTensor]) -> None:
    """Check that all tensors have the names, types and shapes of those that are served.

    Raises:
        WeightsRefused: one is missing, unknown, or of another type or shape.
    """
    for names, problem in (
        (before.keys() - after.keys(), "lack {} tensor(s) of this model"),
        (after.keys() - before.keys(), "have {} tensor(s) that this model does not know"),
    ):
        if found := sorted(name for name in names if not COMPUTED.search(name)):
            more = " ..." if len(found) > SHOWN else ""
            raise WeightsRefused(
                f"the new weights {problem.format(len(found))}: {', '.join(found[:SHOWN])}{more}"
            )
    for name in sorted(before.keys() & after.keys()):
        one, other = before[name], after[name]
        if one.shape != other.shape:
            raise WeightsRefused(
                f"{name} of the new weights has the shape {list(other.shape)}, not {list(one.shape)}"
            )
        if one.kind != other.kind:
            raise WeightsRefused(
                f"{name} of the new weights has numbers of type {other.kind}, not {one.kind}"
            )
