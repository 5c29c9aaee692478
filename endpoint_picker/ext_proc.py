"""Protobuf messages of Envoy's external processing (envoy/service/ext_proc/v3), as far as a picker needs them.

They are built here from a table of field numbers, in a descriptor pool of their own. Of the packages on PyPI with
Envoy's generated messages, one overwrites files of OpenTelemetry's and Google's packages, and one parses in Python.
Fields outside the table are skipped. Names of packages and enums do not travel, so all messages are in one package, and
enums are numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

METHOD = ("envoy.service.ext_proc.v3.ExternalProcessor", "Process")
"""Service and method that Envoy calls."""

_PACKAGE = "kvferry.ext_proc"
_STRUCT = "google.protobuf.Struct"
_MESSAGES = {
    "HeaderValue": "key=1 string, value=2 string, raw_value=3 bytes",
    "HeaderMap": "headers=1 *HeaderValue",
    "HeaderValueOption": "header=1 HeaderValue, append_action=3 int32",
    "HeaderMutation": "set_headers=1 *HeaderValueOption",
    "FilterMetadataEntry": f"key=1 string, value=2 {_STRUCT}",
    "Metadata": "filter_metadata=1 *FilterMetadataEntry",
    "ProtocolConfiguration": "request_body_mode=1 int32, response_body_mode=2 int32",
    "HttpHeaders": "headers=1 HeaderMap, end_of_stream=3 bool",
    "HttpBody": "body=1 bytes, end_of_stream=2 bool",
    "HttpTrailers": "trailers=1 HeaderMap",
    "ProcessingRequest": "request_headers=2 HttpHeaders |request, response_headers=3 HttpHeaders |request, "
    "request_body=4 HttpBody |request, response_body=5 HttpBody |request, request_trailers=6 HttpTrailers |request, "
    "response_trailers=7 HttpTrailers |request, metadata_context=8 Metadata, "
    "protocol_config=11 ProtocolConfiguration",
    "StreamedBodyResponse": "body=1 bytes, end_of_stream=2 bool",
    "BodyMutation": "streamed_response=3 StreamedBodyResponse",
    "CommonResponse": "header_mutation=2 HeaderMutation, body_mutation=3 BodyMutation, clear_route_cache=5 bool",
    "HeadersResponse": "response=1 CommonResponse",
    "BodyResponse": "response=1 CommonResponse",
    "TrailersResponse": "header_mutation=1 HeaderMutation",
    "HttpStatus": "code=1 int32",
    "ImmediateResponse": "status=1 HttpStatus, headers=2 HeaderMutation, body=3 bytes, details=5 string",
    "ProcessingResponse": "request_headers=1 HeadersResponse |response, response_headers=2 HeadersResponse |response, "
    "request_body=3 BodyResponse |response, response_body=4 BodyResponse |response, "
    "request_trailers=5 TrailersResponse |response, response_trailers=6 TrailersResponse |response, "
    f"immediate_response=7 ImmediateResponse |response, dynamic_metadata=8 {_STRUCT}",
}
"""Fields of each message: name=number type, with * before the type of a repeated field and | before its oneof."""
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
    "bool": _FIELD.TYPE_BOOL,
    "int32": _FIELD.TYPE_INT32,
}


class BodyMode(IntEnum):
    """Ways in which Envoy sends a body."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


OVERWRITE = 2
"""Append action of a header that replaces all values of its name."""


def _built() -> descriptor_pool.DescriptorPool:
    """Return a pool with all messages of the table."""
    file = descriptor_pb2.FileDescriptorProto(
        name="kvferry/ext_proc.proto", package=_PACKAGE, syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name]
    )
    for name, fields in _MESSAGES.items():
        made = file.message_type.add(name=name)
        for text in fields.split(", "):
            _add(made, text)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _add(made: descriptor_pb2.DescriptorProto, text: str) -> None:
    named, kind, *choice = text.split(" ")
    name, number = named.split("=")
    repeated, kind = kind.startswith("*"), kind.removeprefix("*")
    field = made.field.add(name=name, number=int(number))
    field.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
    field.type = _SCALARS.get(kind, _FIELD.TYPE_MESSAGE)
    if kind not in _SCALARS:
        field.type_name = f".{kind}" if "." in kind else f".{_PACKAGE}.{kind}"
    if choice:
        if not made.oneof_decl:
            made.oneof_decl.add(name=choice[0].removeprefix("|"))
        field.oneof_index = 0


_POOL = _built()


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ProcessingRequest = _class("ProcessingRequest")
ProcessingResponse = _class("ProcessingResponse")
ImmediateResponse = _class("ImmediateResponse")
CommonResponse = _class("CommonResponse")
