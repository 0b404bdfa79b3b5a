"""Endpoints of conversations, as OpenAI has them."""

from __future__ import annotations

import uuid
from operator import itemgetter
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.answers import encode, json_response
from router.config import HttpConfig
from router.errors import ApiError, refuse
from router.http.body import decoder, read_body
from router.stored.conversation_store import ConversationStore, StoredConversation, TooManyItems
from router.stored.conversations import Item, items_of
from router.stored.listing import DeletedObject, ObjectPage, check_metadata, page_of, whole_page
from router.stored.runs import tenant_of

MOST_ADDED = 20
"""Items that one call adds, as with OpenAI."""
NO_SUCH_CONVERSATION = "There is no conversation of this id: it has expired, was deleted, or never was."


class _Given(msgspec.Struct):
    items: list[Item] | None = None
    metadata: dict[str, str] | None = None


class ConversationObject(msgspec.Struct):
    """A conversation without its items, in OpenAI's form."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


_read = decoder(_Given)


class ConversationEndpoints:
    """Handlers of /v1/conversations."""

    def __init__(self, store: ConversationStore, config: HttpConfig) -> None:
        self._store = store
        self._config = config

    def __repr__(self) -> str:
        return f"<ConversationEndpoints of {self._store!r}>"

    async def create(self, request: Request) -> Response:
        """``POST /v1/conversations``."""
        given = await self._given(request)
        items = items_of(given.items or [], [], uuid.uuid4().hex)
        made = await self._store.begin(tenant_of(request), items, given.metadata or {})
        return json_response(encode(_object_of(made)))

    async def get(self, request: Request) -> Response:
        """``GET /v1/conversations/{id}``."""
        return json_response(encode(_object_of(await self._found(request))))

    async def update(self, request: Request) -> Response:
        """``POST /v1/conversations/{id}``: other metadata."""
        given = await self._given(request)

        def change(found: StoredConversation) -> None:
            found.metadata = given.metadata or {}

        return json_response(encode(_object_of(await self._changed(request, change))))

    async def delete(self, request: Request) -> Response:
        """``DELETE /v1/conversations/{id}``."""
        found = await self._found(request)
        await self._store.delete(found.id)
        return json_response(encode(DeletedObject(found.id, "conversation.deleted")))

    async def list_items(self, request: Request) -> Response:
        """``GET /v1/conversations/{id}/items``."""
        found = await self._found(request)
        return json_response(encode(page_of_items(request, found.items)))

    async def add_items(self, request: Request) -> Response:
        """``POST /v1/conversations/{id}/items``."""
        given = await self._given(request)
        if not given.items:
            refuse("items must have at least one item.", "items")
        new = items_of(given.items, [], uuid.uuid4().hex)
        await self._changed(request, lambda found: found.items.extend(new))
        return json_response(encode(whole_page(new, itemgetter("id"))))

    async def get_item(self, request: Request) -> Response:
        """``GET /v1/conversations/{id}/items/{item}``."""
        found = await self._found(request)
        return json_response(encode(found.items[_index_of(found, request.path_params["item"])]))

    async def delete_item(self, request: Request) -> Response:
        """``DELETE /v1/conversations/{id}/items/{item}``."""

        def change(found: StoredConversation) -> None:
            del found.items[_index_of(found, request.path_params["item"])]

        return json_response(encode(_object_of(await self._changed(request, change))))

    async def _given(self, request: Request) -> _Given:
        given = _read(await read_body(request, self._config) or b"{}")
        if len(given.items or []) > MOST_ADDED:
            refuse(f"items may have {MOST_ADDED} items at a time.", "items")
        check_metadata(given.metadata)
        return given

    async def _found(self, request: Request) -> StoredConversation:
        found = await self._store.get(request.path_params["id"], tenant_of(request))
        if found is None:
            raise ApiError(404, NO_SUCH_CONVERSATION)
        return found

    async def _changed(self, request: Request, change: Any) -> StoredConversation:
        try:
            found = await self._store.change(request.path_params["id"], tenant_of(request), change)
        except TooManyItems as error:
            raise ApiError(400, str(error), param="items") from error
        if found is None:
            raise ApiError(404, NO_SUCH_CONVERSATION)
        return found


def page_of_items(request: Request, items: list[Item]) -> ObjectPage:
    """The page of items that a client asks for."""
    return page_of(request.query_params, items, what="these items", id_of=itemgetter("id"))


def _object_of(found: StoredConversation) -> ConversationObject:
    return ConversationObject(found.id, int(found.created), found.metadata)


def _index_of(found: StoredConversation, item: str) -> int:
    ids = [each["id"] for each in found.items]
    if item not in ids:
        raise ApiError(404, "There is no item of this id in the conversation.")
    return ids.index(item)
