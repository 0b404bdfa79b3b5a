"""Counts of a router's store of answers and batches."""

from __future__ import annotations

from collections import Counter

STORE_EVENTS = (
    "answer_begun", "answer_done", "answer_failed", "answer_taken_over", "answer_abandoned",
    "answer_not_stored",
    "line_done", "line_failed", "line_tried_again", "batch_taken_over",
)  # fmt: skip
"""Events that are counted.

``answer_abandoned`` counts streams for which no client came back, ``answer_not_stored`` answers for which
the store had no room or did not work.
"""


class StoreCounts:
    """Events of one router, and the bytes that the shared file held last."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        """By the names of :data:`STORE_EVENTS`."""
        self.num_bytes: int | None = None
        """None where there is no store."""

    def __repr__(self) -> str:
        return f"<StoreCounts {dict(self.events)}, {self.num_bytes} bytes>"
