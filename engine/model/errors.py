"""Refusal of a model that cannot be served."""

from __future__ import annotations


class CheckpointError(ValueError):
    """Refusal of a model that cannot be served.

    The message names what is wrong and what to do.
    """
