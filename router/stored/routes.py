"""Routes of stored, background and resumable answers."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.routing import Route

from router.config import HttpConfig
from router.stored.conversation_endpoints import ConversationEndpoints
from router.stored.conversation_store import ConversationStore
from router.stored.failures import where_it_works
from router.stored.replayed_body import Handler
from router.stored.responses import StoredResponses
from router.stored.runs import Runs
from router.stored.streams import Streams
from router.text.text_models import TextModels

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
}
"""Paths whose streams may be resumable, by the name of their handler."""


def stored_routes(
    runs: Runs, config: HttpConfig, models: TextModels, handlers: Mapping[str, Handler]
) -> list[Route]:
    """Routes that stand before those of the same paths without a store."""
    streams = Streams(runs, config)
    conversations = ConversationStore(runs.store.database, config.store_ttl)
    responses = StoredResponses(runs, streams, conversations, config, models, handlers["responses"])
    endpoints = ConversationEndpoints(conversations, config)
    return [
        *(
            Route(path, streams.resumable(kind, handlers[kind]), methods=["POST"])
            for kind, path in PATHS.items()
        ),
        *(
            Route(path, where_it_works(handler), methods=[method])
            for method, path, handler in (
                ("GET", "/v1/streams/{id:path}", streams.resume),
                ("POST", "/v1/responses", responses.create),
                ("POST", "/v1/responses/{id:path}/cancel", responses.cancel),
                ("GET", "/v1/responses/{id:path}/input_items", responses.input_items),
                ("GET", "/v1/responses/{id:path}", responses.get),
                ("DELETE", "/v1/responses/{id:path}", responses.delete),
                ("POST", "/v1/conversations", endpoints.create),
                ("GET", "/v1/conversations/{id}", endpoints.get),
                ("POST", "/v1/conversations/{id}", endpoints.update),
                ("DELETE", "/v1/conversations/{id}", endpoints.delete),
                ("GET", "/v1/conversations/{id}/items", endpoints.list_items),
                ("POST", "/v1/conversations/{id}/items", endpoints.add_items),
                ("GET", "/v1/conversations/{id}/items/{item}", endpoints.get_item),
                ("DELETE", "/v1/conversations/{id}/items/{item}", endpoints.delete_item),
            )
        ),
    ]
