"""Requests of an instance while the mesh is paused: standing still or held back."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.messages import PauseMode
from engine.scheduling.request import Request, RequestKey


class Pausing:
    """Pause of one instance, as its standing orders ask for it.

    In the modes ``keep`` and ``abort`` no step is scheduled, so requests wait where they are. In the mode
    ``wait`` those that were here go on, and new ones are held back.
    """

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self._held: dict[RequestKey, tuple[Request, str | None]] = {}
        """With the grammar that each one's output must follow."""

    def __repr__(self) -> str:
        return f"<Pausing {self.mode or 'not'}, {len(self)} held back>"

    def __len__(self) -> int:
        """Requests that are held back."""
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._held.values())

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._held

    @property
    def stands_still(self) -> bool:
        """Whether no step may be scheduled."""
        return self.mode in (PauseMode.KEEP, PauseMode.ABORT)

    def hold(self, request: Request, grammar: str | None) -> bool:
        """Hold a new request back; False if it may go on.

        One that has tokens from elsewhere had begun before the pause.
        """
        if self.mode is not PauseMode.WAIT or request.num_output:
            return False
        self._held[request.key] = request, grammar
        return True

    def forget(self, key: RequestKey) -> bool:
        """Forget a request that is held back; False if it is not."""
        return self._held.pop(key, None) is not None

    def change(self, mode: PauseMode | None) -> list[tuple[Request, str | None]]:
        """Change the mode; returns requests that are held back no longer, oldest first."""
        self.mode = mode
        if mode is PauseMode.WAIT:
            return []
        released, self._held = list(self._held.values()), {}
        return released
