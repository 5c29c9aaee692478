"""Head of a request as Envoy sends it: path, headers, allowed endpoints, and the modes of its bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from kvferry.endpoint_picker.ext_proc import BodyMode
from kvferry.endpoint_picker.replies import DESTINATION, NAMESPACE

SUBSET = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")
"""Metadata namespace and key of the endpoints that a request may go to."""
SERVED = f"{DESTINATION}-served"
"""Metadata key, in NAMESPACE, of the endpoint that the gateway used."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Head of a request.

    path           without the query
    ended          the request has no body
    subset         endpoints that it may go to, as ip:port or as ip for any port; None: any endpoint
    request_mode   BodyMode in which the request's body comes
    response_mode  BodyMode in which the response's body comes
    """

    path: str
    headers: Headers
    ended: bool
    subset: frozenset[str] | None
    request_mode: int
    response_mode: int

    @classmethod
    def of(cls, message: Any) -> RequestHead:
        """Read the first message of a stream.

        A gateway that does not report how it sends bodies sends them in full-duplex mode, as the extension requires."""
        headers = headers_of(message.request_headers)
        config = message.protocol_config if message.HasField("protocol_config") else None
        return cls(
            path=headers.get(":path", "").partition("?")[0],
            headers=headers,
            ended=message.request_headers.end_of_stream,
            subset=_subset(message),
            request_mode=config.request_body_mode if config else BodyMode.FULL_DUPLEX_STREAMED,
            response_mode=config.response_body_mode if config else BodyMode.FULL_DUPLEX_STREAMED,
        )


def headers_of(head: Any) -> Headers:
    """Return the headers of a request or response; Envoy's pseudo-headers are among them."""
    pairs = [(each.key.lower().encode(), each.raw_value or each.value.encode()) for each in head.headers.headers]
    return Headers(raw=pairs)


def served_endpoint(message: Any) -> str:
    """Return the endpoint that served the request, from the message with the response's head; empty if unknown."""
    value = _value(message, NAMESPACE, SERVED)
    return str(value.string_value).strip() if value is not None else ""


def status_of(message: Any) -> int:
    """Return the status of the message with the response's head; 0 if unknown."""
    text = headers_of(message.response_headers).get(":status", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _subset(message: Any) -> frozenset[str] | None:
    """Return the allowed endpoints: a list of texts, or one text with commas. A value of another type allows none."""
    value = _value(message, *SUBSET)
    if value is None:
        return None
    texts = [each.string_value for each in value.list_value.values] or [value.string_value]
    return frozenset(word.strip() for text in texts for word in text.split(",") if word.strip())


def _value(message: Any, namespace: str, key: str) -> Any:
    for each in message.metadata_context.filter_metadata:
        if each.key == namespace and key in each.value.fields:
            return each.value.fields[key]
    return None
