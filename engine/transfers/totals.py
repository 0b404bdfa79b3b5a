"""Totals of an instance's transfers of KV blocks, counted as they end (pure)."""

from __future__ import annotations

import msgspec

from engine.messages import TransferCounters
from engine.transfers.fetching import TransferOutcome


class TransferTotals:
    """Counts of blocks, bytes, seconds and outcomes since the start."""

    def __init__(self) -> None:
        self._counters = TransferCounters()
        self.num_checked = 0, 0
        """Pieces that checks of all kinds compared, and those that differed."""

    def __repr__(self) -> str:
        return f"<TransferTotals {self._counters!r}>"

    def add(self, **amounts: float) -> None:
        """Add to counters, by their names in :class:`engine.messages.TransferCounters`."""
        counters = self._counters
        self._compared(int(amounts.get("checked_blocks", 0)), int(amounts.get("wrong_blocks", 0)))
        sums = {name: getattr(counters, name) + amount for name, amount in amounts.items()}
        self._counters = msgspec.structs.replace(counters, **sums)

    def ended(self, outcome: TransferOutcome) -> None:
        """Count a transfer by its outcome."""
        outcomes = self._counters.outcomes
        outcomes = {**outcomes, outcome.value: outcomes.get(outcome.value, 0) + 1}
        self._counters = msgspec.structs.replace(self._counters, outcomes=outcomes)

    def checked(self, kind: str, *, is_right: bool) -> None:
        """Count a spot check by the kind of its piece's source."""
        self._compared(1, not is_right)
        counters = self._counters
        checked = {**counters.spot_checked, kind: counters.spot_checked.get(kind, 0) + 1}
        wrong = {**counters.spot_wrong, kind: counters.spot_wrong.get(kind, 0) + (not is_right)}
        self._counters = msgspec.structs.replace(counters, spot_checked=checked, spot_wrong=wrong)

    def _compared(self, count: int, wrong: int) -> None:
        self.num_checked = self.num_checked[0] + count, self.num_checked[1] + wrong

    def counters(self, prompt_tokens: int) -> TransferCounters:
        """All totals; ``prompt_tokens`` are those that the scheduler has counted."""
        return msgspec.structs.replace(self._counters, prompt_tokens=prompt_tokens)
