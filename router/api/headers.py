"""Headers of requests that change their treatment, and header values of answers (pure).

A header without a value, as proxies and templates make them, is none.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from starlette.requests import Request

from router.api.validation import MAX_ID_LENGTH, MAX_TIMEOUT, usable_id
from router.errors import refuse
from router.mesh import NumericsSwitch
from router.openai_api import GenerationRequest

CAPSULE = "x-lockstep-capsule"
"""Request header: whether the answer is to hold its capsule."""
PREFERRED_RANK = "x-lockstep-preferred-rank"
"""Request header of an endpoint picker: the instance that it has chosen, by its rank."""
SESSION_HEADERS = ("x-session-affinity", "x-session-id")
NUMERICS_CHANGED = "x-lockstep-numerics-changed"
"""Response header: numerics classes between which the answer changed."""
MOST_REMARKS = 1000
"""Most characters of a response header that may name many things."""


class RequestTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Treatment of one request by its headers: its id, its instance, its deadline."""

    id: str
    """Id of its answer."""
    key: int = 0
    """Number of the client's API key."""
    rank: int | None = None
    """The instance that the client named."""
    preferred: int | None = None
    """The instance that an endpoint picker chose for a single sample."""
    session: str = ""
    timeout: float | None = None
    """Seconds that the answer may take."""
    records: bool = False
    """Whether the answer is to hold its capsule (:mod:`router.capsule`)."""
    records_logprobs: bool = True
    """Whether the capsule is to have log-probabilities."""
    traceparent: str = ""


def read_terms(request: Request, id: str, wanted: GenerationRequest, traceparent: str) -> RequestTerms:
    """The terms of a request, from its headers and fields.

    Raises:
        ApiError: a header is wrong (400).
    """
    return RequestTerms(
        id=id,
        key=key_of(request),
        records=(capsule := _capsule_wish(request)) in ("1", "tokens"),
        records_logprobs=capsule != "tokens",
        rank=pinned_rank(request, wanted),
        session=session(request, wanted),
        preferred=_preferred_rank(request),
        timeout=_deadline(request, wanted),
        traceparent=traceparent,
    )


def key_of(request: Request) -> int:
    """Number of the API key that was presented; 0 where there are none."""
    key: int = getattr(request.state, "key", 0)
    return key


def request_id(request: Request, wanted: GenerationRequest) -> str:
    """The request id: the client's own from header or body, else the server's."""
    return client_id_of(request, wanted.request_id)


def client_id_of(request: Request, in_body: str | None) -> str:
    """The request id, given the one of the body."""
    given = request.headers.get("x-request-id")
    if not given:
        at_door: str = request.state.request_id
        return in_body or at_door
    if not usable_id(given):
        refuse(f"X-Request-Id must be printable ASCII of at most {MAX_ID_LENGTH} characters.", "X-Request-Id")
    return given


def pinned_rank(request: Request, wanted: GenerationRequest) -> int | None:
    """Rank of the instance that the client names by the header or by a field."""
    given = request.headers.get("x-data-parallel-rank")
    if given and not (given.isascii() and given.isdecimal() and len(given) < 10):
        refuse(f"X-data-parallel-rank must be a whole number, got {given[:20]!r}.", "X-data-parallel-rank")
    ranks = {int(given) if given else None, wanted.data_parallel_rank, wanted.routed_dp_rank} - {None}
    if len(ranks) > 1:
        refuse(
            "X-data-parallel-rank, data_parallel_rank and routed_dp_rank name several instances.",
            "data_parallel_rank",
        )
    return next(iter(ranks), None)


def _preferred_rank(request: Request) -> int | None:
    """Rank of the instance that an endpoint picker has chosen, if it can be read.

    The request goes there if that instance takes it now, and elsewhere if not.
    """
    given = request.headers.get(PREFERRED_RANK, "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 10 else None


def _deadline(request: Request, wanted: GenerationRequest) -> float | None:
    """Seconds that the answer may take: X-Request-Timeout, the field ``timeout``, or the shorter of both."""
    given = request.headers.get("x-request-timeout")
    if not given:
        return wanted.timeout
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT:
        refuse(
            f"X-Request-Timeout must be seconds above 0 and at most {MAX_TIMEOUT:g}, got {given[:20]!r}.",
            "X-Request-Timeout",
        )
    return seconds if wanted.timeout is None else min(seconds, wanted.timeout)


def session(request: Request, wanted: GenerationRequest) -> str:
    """Name of the session that a request belongs to; empty without one."""
    for name in SESSION_HEADERS:
        given = request.headers.get(name, "")
        if given and not usable_id(given):
            refuse(f"{name} must be printable ASCII of at most {MAX_ID_LENGTH} characters.", name)
        if given:
            return given
    return wanted.session_id or (wanted.prompt_cache_key or "")[:MAX_ID_LENGTH]


def _capsule_wish(request: Request) -> str:
    given = request.headers.get(CAPSULE, "")
    if given not in ("", "0", "1", "tokens"):
        refuse(
            "X-Lockstep-Capsule must be 1 for a capsule in the answer, tokens for one without "
            f"log-probabilities, or 0, got {given[:20]!r}.",
            "X-Lockstep-Capsule",
        )
    return given


def numerics_changed(changes: Iterable[NumericsSwitch]) -> dict[str, str]:
    """The header of an answer with these changes; nothing where there are none."""
    pairs = ", ".join(dict.fromkeys(map(str, changes)))
    return {NUMERICS_CHANGED: printable(pairs, MOST_REMARKS)} if pairs else {}


def printable(text: str, most: int) -> str:
    """A text as a header's value: printable ASCII, at most so many characters."""
    shown = "".join(letter if letter.isprintable() and letter.isascii() else "?" for letter in text)
    return shown if len(shown) <= most else shown[: most - 3] + "..."
