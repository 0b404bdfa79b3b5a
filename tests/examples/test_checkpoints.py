"""Quantised copies of benchmark models: what their configs name."""

from __future__ import annotations

import pytest

from examples.benchmarks.formats.checkpoints import described


@pytest.mark.parametrize("has_router", [False, True])
def test_what_stays_plain_is_part_of_no_other_name(has_router: bool) -> None:
    """vLLM compares parts of names.

    With ``mlp.gate`` it left the joined ``mlp.gate_up_proj`` of dense layers out.
    """
    kept = described("awq", has_router=has_router)["modules_to_not_convert"]
    merged = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj"]
    merged += ["mlp.experts", "mlp.gate"] if has_router else ["mlp.gate_up_proj"]
    left_out = [name for name in merged if any(each in name for each in kept)]
    assert left_out == (["mlp.gate"] if has_router else [])
