"""Messages of Envoy's external processing and of gRPC's health checks that the picker uses.

Made from tables of field numbers, which is all that the wire has; fields that are left out are skipped where
they come. Published packages with all of Envoy's messages install parts of other packages over them.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

PACKAGE = "lockstep.epp"
STRUCT = ".google.protobuf.Struct"
SCALARS = {"string": 9, "bytes": 12, "bool": 8, "uint32": 13, "int32": 5}
"""``FieldDescriptorProto.Type`` of types that are no messages; enumerations pass as int32."""
MESSAGE, OPTIONAL, REPEATED = 11, 1, 3

Fields = dict[str, tuple[int, str]]

HEAD = {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")}
BODY = {"body": (1, "bytes"), "end_of_stream": (2, "bool")}
MESSAGES: dict[str, Fields] = {
    # envoy.config.core.v3, envoy.type.v3
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "repeated HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "MetadataEntry": {"key": (1, "string"), "value": (2, STRUCT)},
    "Metadata": {"filter_metadata": (1, "repeated MetadataEntry")},
    "HttpStatus": {"code": (1, "int32")},
    # envoy.service.ext_proc.v3
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "HttpHeaders": HEAD,
    "HttpBody": BODY,
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProcessingRequest": {
        "request_headers": (2, "oneof HttpHeaders"),
        "response_headers": (3, "oneof HttpHeaders"),
        "request_body": (4, "oneof HttpBody"),
        "response_body": (5, "oneof HttpBody"),
        "request_trailers": (6, "oneof HttpTrailers"),
        "response_trailers": (7, "oneof HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "observability_mode": (10, "bool"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HeaderMutation": {
        "set_headers": (1, "repeated HeaderValueOption"),
        "remove_headers": (2, "repeated string"),
    },
    "StreamedBodyResponse": BODY,
    "BodyMutation": {"streamed_response": (3, "oneof StreamedBodyResponse")},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation"), "body_mutation": (3, "BodyMutation")},
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "oneof HeadersResponse"),
        "response_headers": (2, "oneof HeadersResponse"),
        "request_body": (3, "oneof BodyResponse"),
        "response_body": (4, "oneof BodyResponse"),
        "request_trailers": (5, "oneof TrailersResponse"),
        "response_trailers": (6, "oneof TrailersResponse"),
        "immediate_response": (7, "oneof ImmediateResponse"),
        "dynamic_metadata": (8, STRUCT),
    },
    # grpc.health.v1
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int32")},
}
"""Fields by message: number and type.

Those of ``oneof`` exclude each other. A map is its entries.
"""

OVERWRITE = 2
"""``HeaderValueOption.HeaderAppendAction``: the value replaces any other, or is added."""
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)
"""``ProcessingMode.BodySendMode``."""
SERVING, NOT_SERVING = 1, 2
"""``HealthCheckResponse.ServingStatus``."""


def _described(name: str, fields: Fields) -> Any:
    message = descriptor_pb2.DescriptorProto(name=name)
    for field, (number, text) in fields.items():
        words = text.split()
        kind = words[-1]
        made = message.field.add(
            name=field, number=number, label=REPEATED if words[0] == "repeated" else OPTIONAL
        )
        if kind in SCALARS:
            made.type = SCALARS[kind]
        else:
            made.type = MESSAGE
            made.type_name = kind if kind == STRUCT else f".{PACKAGE}.{kind}"
        if words[0] == "oneof":
            if not message.oneof_decl:
                message.oneof_decl.add(name="kind")
            made.oneof_index = 0
    return message


def _made() -> dict[str, Any]:
    """Protobuf message classes, by name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="lockstep/epp.proto", package=PACKAGE, syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name]
    )
    file.message_type.extend(_described(name, fields) for name, fields in MESSAGES.items())
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in MESSAGES
    }


CLASSES = _made()


def message(name: str, **fields: Any) -> Any:
    """A message of this name with these fields."""
    return CLASSES[name](**fields)
