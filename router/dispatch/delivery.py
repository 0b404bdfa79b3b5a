"""Delivers the tokens of one engine step to the streams of their requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine.messages import Delta
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.stream import Stream


class Delivery:
    """Books tokens in the ledger, and passes them on to the streams of their entries."""

    def __init__(
        self,
        ledger: Ledger,
        streams: dict[Entry, Stream],
        begins_try: Callable[[Entry, Delta], None],
        has_begun: Callable[[Entry], None],
    ) -> None:
        """``streams`` loses the entries that end.

        ``begins_try`` is called with an entry and the first delta of a try, before that is booked.
        ``has_begun`` is called once it is delivered, unless the request has ended.
        """
        self._ledger = ledger
        self._streams = streams
        self._begins_try = begins_try
        self._has_begun = has_begun

    def __repr__(self) -> str:
        return f"<Delivery to {len(self._streams)} streams>"

    def singles(self, instance: str, singles: Sequence[int]) -> None:
        """Deliver single tokens, which nearly all are: see :attr:`engine.messages.Tokens.singles`.

        Those of requests that are no longer there are dropped.
        """
        entries, now = self._ledger.at(instance), time.perf_counter()
        numbers = iter(singles)
        for number, token_id in zip(numbers, numbers, strict=False):
            entry = entries.get(number)
            if entry is None:
                continue
            sink = entry.sink
            try:
                taken = sink is not None and sink.take_token(token_id, now)
            except Exception as error:  # noqa: BLE001 (is the reader's to raise: others go on)
                if (stream := self._streams.get(entry)) is not None:
                    stream.fail(error)
                continue
            if taken:
                entry.emitted.append(token_id)
            else:
                self._pass_on(entry, Delta(number, [token_id]))

    def deltas(self, instance: str, deltas: Sequence[Delta]) -> None:
        """Deliver deltas; those of requests that are no longer there are dropped."""
        entries = self._ledger.at(instance)
        for delta in deltas:
            entry = entries.get(delta.request)
            if entry is not None:
                self._pass_on(entry, delta)

    def _pass_on(self, entry: Entry, delta: Delta) -> None:
        begins = bool(entry.fruitless)  # the first one of this try
        if begins:
            self._begins_try(entry, delta)
        booked = self._ledger.book(entry, delta)
        if entry.loss is not None:
            entry.returns(booked, time.monotonic())
        ended = booked.finish_reason is not None
        stream = self._streams.pop(entry, None) if ended else self._streams.get(entry)
        if stream is not None:
            stream.push(booked)
        if begins and not ended:
            self._has_begun(entry)
