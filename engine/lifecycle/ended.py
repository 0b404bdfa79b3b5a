"""Early end of an instance, with its exit status."""

from __future__ import annotations


class InstanceEnded(BaseException):
    """Raised to end the instance early; carries the exit status.

    A signal raises it wherever the code happens to be, and nobody on the way may take it for an error of
    their own, as libraries do with any Exception.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
