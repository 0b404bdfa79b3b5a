"""Error responses where the store fails, or has no room."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.errors import ApiError
from router.stored.database import StoreFull, StoreUnusable
from router.stored.replayed_body import Handler


def where_it_works(handler: Handler) -> Handler:
    """The handler, which answers 503 where the store fails and 507 where it is full."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except StoreUnusable as error:
            text = "The store of answers does not work now."
            raise ApiError(503, text, headers={"retry-after": "1"}) from error
        except StoreFull as error:
            raise ApiError(507, "The store is full (--store-max-bytes): delete something.") from error

    return handle
