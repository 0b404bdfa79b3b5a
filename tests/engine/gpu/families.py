"""What fused layers change in the code of transformers' families is changed back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from engine.gpu.fused_layers import FusedRotary


@contextlib.contextmanager
def own_functions_again() -> Iterator[None]:
    """Context behind which families have their own rotary functions."""
    before = {
        name: module.apply_rotary_pos_emb
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and "apply_rotary_pos_emb" in vars(module)
    }
    yield
    for name, module in list(sys.modules.items()):
        function = (
            vars(module).get("apply_rotary_pos_emb") if name.startswith("transformers.models.") else None
        )
        if isinstance(function, FusedRotary):
            vars(module)["apply_rotary_pos_emb"] = before.get(name, function.plain)
