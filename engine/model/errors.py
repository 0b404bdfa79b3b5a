"""Refusal of a model that cannot be served, and errors in one line."""

from __future__ import annotations

import re


class CheckpointError(ValueError):
    """Refusal of a model that cannot be served.

    The message names what is wrong and what to do.
    """


def first_line(error: BaseException) -> str:
    """First line of an error; with the second where the first one promises it."""
    text = re.sub(r":\n\s*", ": ", str(error).strip(), count=1)
    return text.split("\n", 1)[0][:300] or type(error).__name__
