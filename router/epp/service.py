"""The gRPC side of the picker: Envoy's external processing, and health checks.

The extra ``epp`` installs what this module imports, so it is imported only where it is needed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from router.api.headers import PREFERRED_RANK
from router.epp import wire
from router.epp.exchange import (
    DESTINATION,
    NAMESPACE,
    SERVED,
    SUBSET,
    SUBSET_NAMESPACE,
    AnswerBody,
    AnswerHead,
    AnswerTrailers,
    Body,
    BodyMode,
    Choose,
    Event,
    Exchange,
    Head,
    Pick,
    PickerRefusal,
    Reply,
    Trailers,
)
from router.epp.picker import NO_ENDPOINT, Picked, Picker
from router.epp.wire import CLASSES, message

PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
LIVENESS, READINESS = "liveness", "readiness"
"""Services whose health the protocol names, beside the processor's and the server's own."""
MAX_STREAMS = 10_000
"""Requests of gateways at once; the excess is refused."""
MAX_MESSAGE_BYTES = 64 << 20
"""Largest message of a gateway: a whole body, in the mode that sends one."""

MODES = {
    wire.NONE: BodyMode.NONE,
    wire.STREAMED: BodyMode.NONE,
    wire.BUFFERED: BodyMode.WHOLE,
    wire.BUFFERED_PARTIAL: BodyMode.WHOLE,
    wire.FULL_DUPLEX_STREAMED: BodyMode.DUPLEX,
}
ANSWERS: dict[type[Event], tuple[str, str]] = {
    Head: ("request_headers", "HeadersResponse"),
    Body: ("request_body", "BodyResponse"),
    Trailers: ("request_trailers", "TrailersResponse"),
    AnswerHead: ("response_headers", "HeadersResponse"),
    AnswerBody: ("response_body", "BodyResponse"),
    AnswerTrailers: ("response_trailers", "TrailersResponse"),
}
"""Answer to each message of the gateway: its field and the name of its type."""


class Processing:
    """Envoy's external processor, answered by a :class:`.Picker`."""

    def __init__(self, picker: Picker, max_body: int) -> None:
        self._picker = picker
        self._max_body = max_body

    def __repr__(self) -> str:
        return f"<Processing by {self._picker!r}>"

    async def process(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """One HTTP request of the gateway's, from head to the end of its answer."""
        exchange: Exchange | None = None
        picked: Picked | None = None
        try:
            async for received in messages:
                if exchange is None:
                    pieces = _mode(received.protocol_config.response_body_mode) is BodyMode.DUPLEX
                    exchange = Exchange(self._max_body, answers_in_pieces=pieces)
                event = event_of(received)
                if event is None:
                    continue
                if isinstance(event, AnswerHead) and picked is not None and event.served:
                    self._picker.served_by(picked, event.served)
                for reply in exchange.take(event):
                    if isinstance(reply, Choose):
                        picked = await self._picker.pick(reply.head.headers, reply.body, reply.head.subset)
                        choice = None if picked is None else picked.pick
                        for late in exchange.chosen(choice, NO_ENDPOINT):
                            yield message_of(late)
                    else:
                        yield message_of(reply)
        finally:
            if picked is not None:
                self._picker.release(picked)


class PickerHealth:
    """Health of the picker, for gateways and for the kubelet."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    def __repr__(self) -> str:
        return f"<PickerHealth {'ready' if self._is_ready() else 'not ready'}>"

    def status_of(self, service: str) -> int | None:
        """The status of a service by its name; None if it is unknown."""
        if service == LIVENESS:
            return wire.SERVING
        if service in ("", READINESS, PROCESSOR):
            return wire.SERVING if self._is_ready() else wire.NOT_SERVING
        return None

    async def check(self, request: Any, context: Any) -> Any:
        status = self.status_of(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return message("HealthCheckResponse", status=status)


def event_of(received: Any) -> Event | None:
    """Event of a gateway's message; None for an unknown one."""
    kind = received.WhichOneof("kind")
    body: Any = getattr(received, kind) if kind else None
    match kind:
        case "request_headers":
            mode = BodyMode.DUPLEX
            if received.HasField("protocol_config"):
                mode = _mode(received.protocol_config.request_body_mode)
            return Head(_headers(body.headers), body.end_of_stream, mode, _subset(received.metadata_context))
        case "request_body":
            return Body(body.body, body.end_of_stream)
        case "request_trailers":
            return Trailers()
        case "response_headers":
            return AnswerHead(_text(received.metadata_context, NAMESPACE, SERVED))
        case "response_body":
            return AnswerBody(body.body, body.end_of_stream)
        case "response_trailers":
            return AnswerTrailers()
    return None


def message_of(reply: Reply | PickerRefusal) -> Any:
    """Protobuf message of a reply."""
    if isinstance(reply, PickerRefusal):
        status = message("HttpStatus", code=reply.status)
        refusal = message(
            "ImmediateResponse", status=status, body=reply.text.encode(), details="lockstep_epp"
        )
        return message("ProcessingResponse", immediate_response=refusal)
    field, kind = ANSWERS[reply.to]
    if kind == "TrailersResponse":
        answer = message(kind)  # headers cannot be changed any more: the metadata names the endpoint
    else:
        common = message("CommonResponse", header_mutation=_mutation(reply.pick) if reply.pick else None)
        if reply.chunk is not None:
            streamed = message("StreamedBodyResponse", body=reply.chunk, end_of_stream=reply.ends)
            common.body_mutation.streamed_response.CopyFrom(streamed)
        answer = message(kind, response=common)
    made = message("ProcessingResponse", **{field: answer})
    if reply.pick is not None:
        made.dynamic_metadata.update({NAMESPACE: {DESTINATION: reply.pick.endpoint}})
    return made


def _mutation(pick: Pick) -> Any:
    headers = {DESTINATION: pick.endpoint}
    if pick.rank is not None:
        headers[PREFERRED_RANK] = str(pick.rank)
    mutation = message("HeaderMutation")
    for key, value in headers.items():
        header = message("HeaderValue", key=key, raw_value=value.encode())
        mutation.set_headers.append(message("HeaderValueOption", header=header, append_action=wire.OVERWRITE))
    if pick.rank is None:
        mutation.remove_headers.append(PREFERRED_RANK)  # a client's own
    return mutation


def _mode(number: int) -> BodyMode:
    return MODES.get(number, BodyMode.NONE)


def _headers(found: Any) -> dict[str, str]:
    """Headers by name; gateways of before 2024 send values as text."""
    return {
        each.key.lower(): each.raw_value.decode("latin-1") if each.raw_value else each.value
        for each in found.headers
    }


def _found(metadata: Any, namespace: str, key: str) -> Any:
    """The value of a key in a namespace of the gateway's metadata; None without one."""
    for entry in metadata.filter_metadata:
        if entry.key == namespace and key in entry.value.fields:
            return entry.value.fields[key]
    return None


def _subset(metadata: Any) -> tuple[str, ...] | None:
    """The endpoints that the gateway allows; None for all."""
    value = _found(metadata, SUBSET_NAMESPACE, SUBSET)
    if value is None:
        return None
    if value.WhichOneof("kind") == "string_value":
        return tuple(filter(None, (each.strip() for each in value.string_value.split(","))))
    return tuple(each.string_value for each in value.list_value.values)


def _text(metadata: Any, namespace: str, key: str) -> str:
    value = _found(metadata, namespace, key)
    return "" if value is None else str(value.string_value)


def add_health(server: Any, health: PickerHealth) -> None:
    """Offer health checks at a server."""
    handler = grpc.unary_unary_rpc_method_handler(
        health.check,
        request_deserializer=CLASSES["HealthCheckRequest"].FromString,
        response_serializer=CLASSES["HealthCheckResponse"].SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HEALTH, {"Check": handler}),))


def make_server(processing: Processing, health: PickerHealth) -> Any:
    """A server of the processor and of health checks, which listens nowhere yet."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=MAX_STREAMS,
    )
    handler = grpc.stream_stream_rpc_method_handler(
        processing.process,
        request_deserializer=CLASSES["ProcessingRequest"].FromString,
        response_serializer=CLASSES["ProcessingResponse"].SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PROCESSOR, {"Process": handler}),))
    add_health(server, health)
    return server


def make_health_server(health: PickerHealth) -> Any:
    """A server of health checks alone, for the kubelet."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_health(server, health)
    return server
