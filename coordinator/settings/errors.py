"""The error type for unusable flags and settings files."""

from __future__ import annotations


class FlagError(ValueError):
    """A setting that cannot be used; the message names it."""
