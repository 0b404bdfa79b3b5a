"""Cost of adapters in the choice of an instance."""

from __future__ import annotations

import pytest

from engine.messages import AdapterUse
from router.dispatch.adapter_costs import SWAP_COST, TURN_COST, adapter_cost


@pytest.mark.parametrize(
    ("active", "laid_out", "sent", "cost"),
    [
        ([], [], [], SWAP_COST),
        ([], ["x"], [], 0.0),
        (["x"], ["x"], [], 0.0),
        (["x"], [], [], 0.0),
        ([], [], ["x"], 0.0),
        (["a"], ["a"], [], SWAP_COST),
        (["a", "b"], ["a", "b"], [], SWAP_COST + TURN_COST),
        (["a"], ["a"], ["b", "c"], SWAP_COST + 2 * TURN_COST),
        (["a", "b"], ["a", "x"], [], TURN_COST),
    ],
)
def test_an_adapter_costs_what_it_waits_for(
    active: list[str], laid_out: list[str], sent: list[str], cost: float
) -> None:
    use = AdapterUse(2, [], [], active, laid_out)
    assert adapter_cost("x", use, sent) == cost
    assert adapter_cost("", use, sent) == 0.0
    assert adapter_cost("x", None, sent) == 0.0
