"""Families whose images can be served (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = frozenset({"idefics3", "internvl", "llava", "mistral3", "smolvlm"})
"""Model types whose text model takes an image as rows of its stream, at the positions of its placeholders.

Others give images positions of their own, let them look ahead, or add to them behind some layers: of these
the language part is served alone.
"""
TOKEN = ("image_token_id", "image_token_index")
"""Names that configurations have for the placeholder."""


def image_token(config: Mapping[str, Any]) -> int | None:
    """Token that stands for a row of an image in this model's prompts; None: it takes no images.

    ``config``: of config.json.
    """
    if config.get("model_type") not in FAMILIES:
        return None
    found = next((config[name] for name in TOKEN if config.get(name) is not None), None)
    return found if isinstance(found, int) and found >= 0 else None
