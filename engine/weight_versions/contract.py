"""Interface between the mesh's side of a weight update and the inside of an instance.

docs/design/weight-versions.md has the order of the calls and what follows from an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from coordinator.messages import InFlight, WeightUpdate


class WeightsRefused(Exception):
    """New weights cannot be used here; the message is the reason, for operators.

    They have another shape or data type, a tensor is missing, a file is cut off, or memory is short. The
    version in use goes on.
    """


class WeightsSuperseded(Exception):
    """Raised by :meth:`WeightVersions.prepare` when ``should_stop`` returned True."""


class WeightVersions(Protocol):
    """Weights of one instance: the version in use, and at most one other."""

    def prepare(self, update: WeightUpdate, should_stop: Callable[[], bool]) -> str:
        """Read and lay out a version while steps run; returns its digest.

        The digest is that of all bytes of all tensors. Called in a background thread, one call at a time.
        What the running steps use does not change. A second call for the same update returns the same digest.
        What an earlier update had prepared is discarded.

        Raises:
            WeightsRefused: the version cannot be used here.
            WeightsSuperseded: ``should_stop`` returned True.
        """
        ...

    def switch(self, update: WeightUpdate, in_flight: InFlight) -> None:
        """Use the prepared version from the next step on.

        Called in the step thread, between two steps, while none is under way. With spread experts all members
        of a group call it when they enter the group's epoch. Steps that were cut short by a death may wait to
        run again: they run with the new weights. Names of pieces and the numerics class change with it.
        Requests that are here are treated as ``in_flight`` says. An exception ends the instance.
        """
        ...

    def discard(self, update: str) -> None:
        """Give back what was prepared for an update, by its id; in the background thread.

        Harmless if nothing was, or if it is in use by now.
        """
        ...
