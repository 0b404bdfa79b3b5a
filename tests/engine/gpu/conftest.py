"""What tests of fused layers change in the code of families is changed back."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from engine.gpu.fused_layers import FusedRotary


@pytest.fixture(autouse=True)
def _families_get_back_their_functions() -> Iterator[None]:
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
