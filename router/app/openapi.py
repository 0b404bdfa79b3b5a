"""The OpenAPI document of the endpoints, made from the structs that they read and write."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from router.api.anthropic_messages import wire as messages
from router.api.native_generation import NativeOutput, NativeRequest
from router.api.ollama.errors import PREFIX as OLLAMA_PATHS
from router.api.ollama.wire import (
    REFUSED_CHANGES,
    OllamaChatLine,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaTextLine,
)
from router.api.responses.wire import InputTokens, ResponseObject, ResponsesRequest
from router.api.token_generation import Generated, GenerateRequest, RenderedRequest
from router.app.fault_status import FaultStatus
from router.app.ollama_models import OllamaModels, OllamaShown, OllamaShowRequest, OllamaVersion
from router.app.server_info import IsScaling, ServerInfo, Sleeping
from router.batches.objects import BatchObject, BatchRequest, FileObject
from router.capsule import ReplayAnswer, ReplayRequest
from router.errors import ErrorBody
from router.metrics.loads import Loads, OlderLoad, ServerLoad
from router.openai_api import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from router.pooled import wire as pooled
from router.pooled.tei_errors import PATHS as TEI_PATHS
from router.signing.keys import KEYS_PATH, PublicKeys
from router.stored.listing import DeletedObject, ObjectPage

NDJSON = "application/x-ndjson"

Struct = type[msgspec.Struct]


class Operation(msgspec.Struct, frozen=True):
    """Request and response of one method of a path.

    ``None`` for no body, or one that is no JSON.
    """

    method: str
    path: str
    summary: str
    body: Struct | None = None
    answer: Struct | None = None
    streams: bool = False
    stream_type: str = "text/event-stream"
    is_open: bool = False
    """Whether clients need no key."""


OPERATIONS = [
    Operation("post", "/v1/completions", "Text to text", CompletionRequest, Completion, True),
    Operation("post", "/v1/chat/completions", "Messages to a message", ChatRequest, ChatCompletion, True),
    Operation(
        "post", "/invocations", "Either of the two, by its fields", ChatRequest, ChatCompletion, True
    ),
    Operation("post", "/v1/responses", "The same as a response", ResponsesRequest, ResponseObject, True),
    Operation(
        "post", "/v1/responses/input_tokens", "Tokens of such a request", ResponsesRequest, InputTokens
    ),
    Operation("get", "/v1/responses/{id}", "A stored response, or its stream", None, ResponseObject),
    Operation("get", "/v1/responses/{id}/input_items", "Items that a stored response answers"),
    Operation("delete", "/v1/responses/{id}", "Delete a stored response"),
    Operation(
        "post", "/v1/responses/{id}/cancel", "End a response in the background", None, ResponseObject
    ),
    Operation("get", "/v1/streams/{id}", "The rest of a resumable stream"),
    *(
        Operation(method, "/v1/conversations" + path, summary)
        for method, path, summary in (
            ("post", "", "Begin a conversation"),
            ("get", "/{id}", "Its metadata"),
            ("post", "/{id}", "Change its metadata"),
            ("delete", "/{id}", "Delete a conversation"),
            ("get", "/{id}/items", "Its items, a page at a time"),
            ("post", "/{id}/items", "Add items"),
            ("get", "/{id}/items/{item}", "One of them"),
            ("delete", "/{id}/items/{item}", "Delete an item"),
        )
    ),
    Operation("post", "/v1/files", "Upload the requests of a batch, as a form", None, FileObject),
    Operation("get", "/v1/files", "Files, a page at a time", None, ObjectPage),
    Operation("get", "/v1/files/{id}", "One of them", None, FileObject),
    Operation("delete", "/v1/files/{id}", "Delete a file", None, DeletedObject),
    Operation("get", "/v1/files/{id}/content", "What a file has"),
    Operation("post", "/v1/batches", "Run the requests of a file", BatchRequest, BatchObject),
    Operation("get", "/v1/batches", "Batches, a page at a time", None, ObjectPage),
    Operation("get", "/v1/batches/{id}", "One of them", None, BatchObject),
    Operation("post", "/v1/batches/{id}/cancel", "End a batch with what it has", None, BatchObject),
    Operation(
        "post", "/v1/messages", "The same in Anthropic's words",
        messages.MessagesRequest, messages.Message, True,
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "Tokens of a conversation",
        messages.CountTokensRequest, messages.TokenCount,
    ),
    Operation(
        "post", "/v1/chat/completions/render", "A chat as token ids", ChatRequest, RenderedRequest
    ),
    Operation("post", "/v1/completions/render", "A completion as token ids", CompletionRequest),
    Operation("post", "/skyrl/v1/generate", "Token ids and experts", GenerateRequest, Generated),
    Operation("post", "/finish_session", "Nothing; for SkyRL's client"),
    Operation(
        "post", "/inference/v1/generate", "Token ids to token ids", GenerateRequest, Generated, True
    ),
    Operation("post", "/generate", "Text or token ids to both", NativeRequest, NativeOutput, True),
    Operation("put", "/generate", "Text or token ids to both", NativeRequest, NativeOutput, True),
    Operation(
        "post", "/api/chat", "A chat in Ollama's words", OllamaChatRequest, OllamaChatLine, True, NDJSON
    ),
    Operation(
        "post", "/api/generate", "Text to text in Ollama's words",
        OllamaGenerateRequest, OllamaTextLine, True, NDJSON,
    ),
    Operation("get", "/api/tags", "The model, by each of its names", None, OllamaModels),
    Operation("get", "/api/ps", "The same, as loaded", None, OllamaModels),
    Operation("post", "/api/show", "Facts of the model", OllamaShowRequest, OllamaShown),
    Operation("get", "/api/version", "The version of Ollama's API", None, OllamaVersion),
    *(
        Operation(method.lower(), path, f"Refused: would {what}")
        for path, (method, what) in REFUSED_CHANGES.items()
    ),
    *(
        Operation("post", path, summary, body, answer)
        for path, summary, body, answer in (
            ("/v1/embeddings", "Texts to embeddings", pooled.EmbeddingRequest, pooled.PooledList),
            ("/v2/embed", "The same in Cohere's words", pooled.CohereEmbedRequest, pooled.CohereEmbedded),
            ("/embed", "The same in the words of text-embeddings-inference", pooled.TeiRequest, None),
            ("/api/embed", "The same in Ollama's", pooled.OllamaEmbedRequest, pooled.OllamaEmbedded),
            ("/api/embeddings", "One of them", pooled.OllamaEmbedRequest, pooled.OllamaEmbedding),
            ("/pooling", "Numbers of any task", pooled.PoolingRequest, pooled.PooledList),
            ("/score", "Pairs of texts to scores", pooled.ScoreRequest, pooled.PooledList),
            ("/v1/score", "The same", pooled.ScoreRequest, pooled.PooledList),
            ("/rerank", "Documents by their score", pooled.RerankRequest, pooled.RankedList),
            ("/v1/rerank", "The same", pooled.RerankRequest, pooled.RankedList),
            ("/v2/rerank", "The same in Cohere's words", pooled.RerankRequest, pooled.RankedList),
            ("/classify", "Texts to classes", pooled.PoolingRequest, pooled.PooledList),
            ("/predict", "The same for text-embeddings-inference", pooled.TeiRequest, None),
            ("/similarity", "Cosines of embeddings", pooled.SimilarityRequest, None),
        )
    ),
    Operation("post", "/v1/replay", "A sample of a capsule, computed again", ReplayRequest, ReplayAnswer),
    Operation("get", "/v1/models", "The model, by each of its names", None, ModelList),
    Operation("get", "/v1/models/{name}", "One of them", None, ModelCard),
    Operation("get", "/v1/loads", "What each instance has to do", None, Loads),
    Operation("get", "/get_load", "The same, as SGLang had it before", None, OlderLoad),
    Operation("post", "/tokenize", "Text or messages to token ids", TokenizeRequest, TokenizeAnswer),
    Operation("post", "/detokenize", "Token ids to text", DetokenizeRequest, DetokenizeAnswer),
    Operation("get", "/tokenizer_info", "tokenizer_config.json"),
    Operation("get", "/load", "Requests being generated for", None, ServerLoad, is_open=True),
    Operation("get", KEYS_PATH, "Public keys that sign capsules", None, PublicKeys, is_open=True),
    Operation("get", "/health", "200 while an instance is ready", is_open=True),
    Operation("get", "/health_generate", "The same as /health", is_open=True),
    Operation("get", "/livez", "200 while this router answers at all", is_open=True),
    Operation("get", "/ping", "The same as /health", is_open=True),
    Operation("post", "/ping", "The same as /health", is_open=True),
    Operation("get", "/version", "The version of Lockstep", is_open=True),
    Operation("get", "/server_info", "Model, versions and flags", None, ServerInfo),
    Operation("get", "/is_sleeping", "Whether instances sleep", None, Sleeping, is_open=True),
    Operation("post", "/is_scaling_elastic_ep", "Whether instances start or leave", None, IsScaling),
    Operation("get", "/fault_tolerance/status", "The state of each instance", None, FaultStatus),
    Operation("get", "/metrics", "For Prometheus", is_open=True),
    Operation("get", "/openapi.json", "This document", is_open=True),
]  # fmt: skip


@functools.cache
def document(version: str, *, with_keys: bool, prefix: str = "") -> bytes:
    """OpenAPI document as JSON, with ``prefix`` before each path."""
    structs = list({struct for op in OPERATIONS for struct in (op.body, op.answer) if struct} | {ErrorBody})
    schemas, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    reference = dict(zip(structs, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, reference, with_keys)
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Lockstep", "version": version},
            "servers": [{"url": prefix or "/"}],
            "paths": paths,
            "components": {"schemas": components} | ({"securitySchemes": schemes} if with_keys else {}),
        }
    )


def _described(operation: Operation, reference: dict[Struct, Any], with_keys: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation, reference)}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    queries = ["dp_rank"] if operation.path == "/v1/loads" else []
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ] + [{"name": name, "in": "query", "schema": {"type": "integer"}} for name in queries]
    if parameters:
        found["parameters"] = parameters
    if operation.body is not None:
        content = {"application/json": {"schema": reference[operation.body]}}
        found["requestBody"] = {"required": True, "content": content}
    if with_keys and not operation.is_open:
        found["security"] = [{"key": []}]
    return found


def _responses(operation: Operation, reference: dict[Struct, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": reference[operation.answer]}
    if operation.streams:
        content[operation.stream_type] = {"schema": {"type": "string"}}
    error = {"description": "Error", "content": {"application/json": {"schema": reference[ErrorBody]}}}
    if operation.path.startswith("/v1/messages"):
        error = {"description": "Error, in Anthropic's shape"}
    if operation.path.startswith(OLLAMA_PATHS):
        error = {"description": "Error, in Ollama's shape"}
    if operation.path in TEI_PATHS:
        error = {"description": "Error, in the shape of text-embeddings-inference"}
    good = {"description": "OK"} | ({"content": content} if content else {})
    return {"200": good, "default": error}
