"""Pages, deletions and metadata of stored objects, as OpenAI has them (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, TypeVar

import msgspec

from router.errors import refuse

SHOWN = 20
"""Objects of a page whose client names no limit."""
MOST_METADATA, MOST_KEY, MOST_VALUE = 16, 64, 512
"""Pairs of an object's metadata, and characters of their halves."""

Listed = TypeVar("Listed")


class ObjectPage(msgspec.Struct):
    """Page of stored objects."""

    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedObject(msgspec.Struct):
    """Answer to a deletion."""

    id: str
    object: str
    deleted: bool = True


def page_of(
    query: Mapping[str, str],
    found: Sequence[Listed],
    *,
    what: str,
    most: int = 100,
    shown: int = SHOWN,
    id_of: Callable[[Listed], str] = attrgetter("id"),
) -> ObjectPage:
    """The page that a client asks for, newest first by default.

    ``found`` is in ascending order.

    Raises:
        ApiError: a parameter is wrong (400).
    """
    limit, order = query.get("limit", str(shown)), query.get("order", "desc")
    is_number = limit.isascii() and limit.isdecimal() and len(limit) < 10
    if not (is_number and 1 <= int(limit) <= most):
        refuse(f"limit must be a whole number from 1 to {most}, got {limit[:20]!r}.", "limit")
    if order not in ("asc", "desc"):
        refuse("order must be asc or desc.", "order")
    ordered = found if order == "asc" else found[::-1]
    if (after := query.get("after")) is not None:
        ids = list(map(id_of, ordered))
        if after not in ids:
            refuse(f"after must be the id of one of {what}.", "after")
        ordered = ordered[ids.index(after) + 1 :]
    return whole_page(ordered[: int(limit)], id_of, has_more=len(ordered) > int(limit))


def whole_page(
    found: Sequence[Listed], id_of: Callable[[Listed], str], *, has_more: bool = False
) -> ObjectPage:
    """A page of these objects."""
    first, last = (id_of(found[0]), id_of(found[-1])) if found else (None, None)
    return ObjectPage(list(found), first, last, has_more)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Refuse metadata with too many pairs, or too long ones.

    Raises:
        ApiError: so it is (400).
    """
    given = metadata or {}
    is_long = any(len(key) > MOST_KEY or len(value) > MOST_VALUE for key, value in given.items())
    if is_long or len(given) > MOST_METADATA:
        refuse(
            f"metadata may have {MOST_METADATA} pairs, of {MOST_KEY} and {MOST_VALUE} characters.", "metadata"
        )


def number_of(given: str, name: str, form: str = "the number of an event") -> int:
    """Number of an event in a query or a header.

    Raises:
        ApiError: it is none (400).
    """
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        refuse(f"{name} must be {form}, got {given[:80]!r}.", name)
    return int(given)
