"""Share of a core that the encoder of images has beside steps (pure)."""

from __future__ import annotations


class EncodingShare:
    """Priority of an encoder's next layer, by the share of a core so far.

    They run at low priority, so that images stop no decode. Where others leave them less than :data:`LEAST`
    of a core, layers run at the priority of steps until it is made up for. So an image is encoded however
    busy the host is.
    """

    LEAST = 1 / 16
    """Share of a core.

    Beside one instance that computes all the time, low priority gets twice as much.
    """
    SPARE, MOST = 0.02, 1.0
    """CPU seconds that are remembered at most: had beyond it, and owed.

    So steps share their cores for no longer than that. A layer of over 16 s is not made up for wholly.
    """

    def __init__(self) -> None:
        self._owed = 0.0

    def __repr__(self) -> str:
        return f"<EncodingShare, {self._owed:.3f} CPU seconds owed>"

    @property
    def is_late(self) -> bool:
        """Whether the next layer is to run at the priority of steps."""
        return self._owed > 0

    def took(self, cpu: float, seconds: float) -> None:
        """Take in a layer: its thread's CPU seconds, and those by the clock."""
        self._owed = min(self.MOST, max(-self.SPARE, self._owed + self.LEAST * seconds - cpu))
