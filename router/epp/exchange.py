"""Dialogue with a gateway about one request: which answers, and when (pure).

The gateway sends the request's head, then its body in one of several modes (Envoy's ``BodySendMode``). Once
the request is known as far as it will be, an endpoint is chosen. What comes of the answer is passed through.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

DESTINATION = "x-gateway-destination-endpoint"
"""The header and the metadata key of the chosen endpoint."""
SERVED = "x-gateway-destination-endpoint-served"
"""The metadata key under which a gateway reports the endpoint that served a request."""
SUBSET = "x-gateway-destination-endpoint-subset"
"""The metadata key under which a gateway lists the endpoints that may be chosen."""
NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"


class BodyMode(enum.Enum):
    """How a gateway sends the body of a request."""

    NONE = 0
    """No body before the answer to the head: the choice goes by load alone."""
    WHOLE = 1
    """Whole body in one message after the head; its answer may change headers."""
    DUPLEX = 2
    """Body in pieces that are sent back; the answer to the head may wait."""


# ---- from the gateway


class Head(msgspec.Struct, frozen=True):
    """Request head as a gateway sends it."""

    headers: Mapping[str, str]
    ends: bool = False
    """Whether no body follows."""
    mode: BodyMode = BodyMode.DUPLEX
    subset: tuple[str, ...] | None = None


class Body(msgspec.Struct, frozen=True):
    chunk: bytes
    ends: bool = False


class Trailers(msgspec.Struct, frozen=True):
    """Trailers of the request."""


class AnswerHead(msgspec.Struct, frozen=True):
    """Head of the answer to the client."""

    served: str = ""
    """The endpoint that it comes from, if the gateway reports that."""


class AnswerBody(msgspec.Struct, frozen=True):
    chunk: bytes
    ends: bool = False


class AnswerTrailers(msgspec.Struct, frozen=True):
    """Trailers of the answer."""


Event = Head | Body | Trailers | AnswerHead | AnswerBody | AnswerTrailers


# ---- to the gateway


class Pick(msgspec.Struct, frozen=True):
    """Chosen endpoint, with the instance that it should use."""

    endpoint: str
    rank: int | None = None
    """The instance that the router should use; None: it chooses itself."""


class Choose(msgspec.Struct, frozen=True):
    """Order: choose an endpoint now, then call :meth:`Exchange.chosen`."""

    head: Head
    body: bytes


class Reply(msgspec.Struct, frozen=True):
    """Reply to one message of the gateway."""

    to: type[Event]
    pick: Pick | None = None
    chunk: bytes | None = None
    """Piece of a body to pass on; None where the gateway keeps it."""
    ends: bool = False


class PickerRefusal(msgspec.Struct, frozen=True):
    """Order to the gateway: answer the request with this status."""

    status: int
    text: str


class Exchange:
    """State of one request from its head to the end of its answer."""

    def __init__(self, max_body: int, *, answers_in_pieces: bool = False) -> None:
        """``max_body``: bytes of a request that are kept for the choice.

        ``answers_in_pieces``: the bodies of answers must be sent back, too.
        """
        self._max_body = max_body
        self._answers_in_pieces = answers_in_pieces
        self._head: Head | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._waits: list[Event] = []
        """Messages of the gateway's that are answered once the choice is made."""
        self._is_open = True
        """No choice has been made."""

    def __repr__(self) -> str:
        return f"<Exchange of {self._size} bytes, {'no choice yet' if self._is_open else 'chosen'}>"

    def take(self, event: Event) -> Sequence[Reply | Choose]:
        """Replies to a message; a :class:`Choose` comes last, and once per request."""
        match event:
            case Head():
                return self._on_head(event)
            case Body():
                return self._on_body(event)
            case Trailers():
                return self._choose(event) if self._is_open else [Reply(Trailers)]
            case AnswerBody() if self._answers_in_pieces:
                return [Reply(AnswerBody, chunk=event.chunk, ends=event.ends)]
            case _:
                return [Reply(type(event))]

    def chosen(self, pick: Pick | None, why: str = "") -> Sequence[Reply | PickerRefusal]:
        """Replies to messages that waited for the choice; None: no endpoint was ready."""
        waits, self._waits = self._waits, []
        self._chunks.clear()
        if pick is None:
            return [PickerRefusal(503, why)]
        replies = [self._reply(event) for event in waits]
        replies[0] = msgspec.structs.replace(replies[0], pick=pick)
        return replies

    # ----

    def _on_head(self, head: Head) -> Sequence[Reply | Choose]:
        self._head = head
        if head.ends or head.mode is BodyMode.NONE:
            return self._choose(head)
        if head.mode is BodyMode.WHOLE:
            return [Reply(Head)]
        self._waits.append(head)
        return []

    def _on_body(self, body: Body) -> Sequence[Reply | Choose]:
        if not self._is_open:
            return [self._reply(body)]
        self._chunks.append(body.chunk)
        self._size += len(body.chunk)
        if self._is_whole or body.ends or self._size > self._max_body:
            return self._choose(body)
        self._waits.append(body)
        return []

    def _choose(self, event: Event) -> Sequence[Reply | Choose]:
        """Have an endpoint chosen, with the messages that wait and this one."""
        assert self._head is not None, "the head comes first"
        self._is_open = False
        self._waits.append(event)
        body = b"".join(self._chunks)
        return [Choose(self._head, body if self._size <= self._max_body else b"")]

    @property
    def _is_whole(self) -> bool:
        return self._head is not None and self._head.mode is BodyMode.WHOLE

    def _reply(self, event: Event) -> Reply:
        if isinstance(event, Body) and self._head is not None and self._head.mode is BodyMode.DUPLEX:
            return Reply(Body, chunk=event.chunk, ends=event.ends)
        return Reply(type(event))
