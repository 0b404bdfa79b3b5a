"""Tokens and deltas of steps for one router (pure).

Most tokens are two numbers; few come with more.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

import msgspec

from engine.messages import Delta, Tokens


def halves(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Two messages with half of the deltas each.

    The report on the instance goes with the second one.
    """
    half = len(tokens.deltas) // 2
    first = Tokens(deltas=tokens.deltas[:half], singles=tokens.singles)
    return first, msgspec.structs.replace(tokens, deltas=tokens.deltas[half:], singles=[])


class OutgoingTokens:
    """Tokens and deltas for one router, in the form of :class:`engine.messages.Tokens`.

    Those of one request stay in order if ``singles`` are handled first.
    """

    def __init__(self, deltas: Iterable[Delta] = ()) -> None:
        self.singles: list[int] = []
        """See :attr:`engine.messages.Tokens.singles`."""
        self.deltas: list[Delta] = []
        self._with_deltas: set[int] = set()
        for delta in deltas:
            self.add(delta)

    def __repr__(self) -> str:
        return f"<OutgoingTokens of {len(self.singles) // 2} tokens and {len(self.deltas)} deltas>"

    def __len__(self) -> int:
        return len(self.singles) // 2 + len(self.deltas)

    def __iter__(self) -> Iterator[Delta]:
        numbers = iter(self.singles)
        for request, token_id in zip(numbers, numbers, strict=True):
            yield Delta(request, [token_id])
        yield from self.deltas

    def add_token(self, request: int, token_id: int) -> None:
        """Add a token without logprobs, end or anything else."""
        if request in self._with_deltas:
            self.deltas.append(Delta(request, [token_id]))
        else:
            self.singles += (request, token_id)

    def add(self, delta: Delta) -> None:
        if delta.is_single:
            self.add_token(delta.request, delta.token_ids[0])
        else:
            self.deltas.append(delta)
            self._with_deltas.add(delta.request)

    def without(self, requests: Container[int]) -> OutgoingTokens:
        """Copy without the tokens and deltas of some requests."""
        return OutgoingTokens(delta for delta in self if delta.request not in requests)
