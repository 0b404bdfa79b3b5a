"""How far the attention of two backends may be apart."""

from __future__ import annotations

import torch

from engine.model.choice import LEAST_SIZE, TOLERANCE, greatest_difference


def test_a_near_token_beside_averages_is_judged_by_its_own_size() -> None:
    """Outputs of tokens with long contexts may be averages, a twelfth as large here."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(698, 16, 64, generator=generator)
    outputs[1:] /= 12.0
    rounded = outputs.to(torch.bfloat16).float()
    limit = TOLERANCE[torch.bfloat16]
    assert float(greatest_difference(rounded, outputs)) < limit / 5
    wrong = rounded.clone()
    wrong[0] *= 1.04
    assert float(greatest_difference(wrong, outputs)) > limit
    wrong = rounded.clone()
    wrong[500] *= 1.05
    assert float(greatest_difference(wrong, outputs)) > limit, "and so are the others"


def test_a_token_of_nearly_nothing_counts_as_a_tenth_of_the_mean() -> None:
    outputs = torch.ones(100, 1, 4)
    outputs[3] = 0.0
    found = outputs.clone()
    found[3] = LEAST_SIZE / 100
    assert 0.005 < float(greatest_difference(found, outputs)) < 0.02
    assert float(greatest_difference(outputs * 0, outputs * 0)) == 0.0
