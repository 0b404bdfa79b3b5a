"""Begin and end of a step: ids or given rows, all rows or wanted ones."""

from __future__ import annotations

import torch


class StepEnds:
    """Ends of a program's steps, chosen before its first one."""

    def __init__(self) -> None:
        self.from_rows = False
        """Whether steps begin with rows that are given, not with the embedding."""
        self.keeps = False
        """Whether all rows go through the last layer, not only those whose logits are wanted."""
        self.stream: torch.Tensor | None = None
        """Rows [most, hidden] of a step, as its last layer leaves them."""

    def __repr__(self) -> str:
        return f"<StepEnds from {'rows' if self.from_rows else 'ids'}, {'all' if self.keeps else 'wanted'}>"

    def rows(self, tokens: int) -> torch.Tensor:
        """Rows [tokens, hidden] behind the last layer, before its norm; valid until the next step."""
        assert self.keeps
        assert self.stream is not None
        return self.stream[:tokens]
