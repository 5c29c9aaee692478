"""Builds the answers to Envoy: the chosen endpoints, the body unchanged, errors, and pass-through messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvferry.endpoint_picker.ext_proc import OVERWRITE, BodyMode, CommonResponse, ImmediateResponse, ProcessingResponse
from kvferry.protocol.errors import KvferryError
from kvferry.router.api.http_errors import error_body
from kvferry.router.api.sse import dump
from kvferry.runtime.rejection import retry_headers

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key of the metadata, with the chosen endpoints as ip:port, the best first, separated by commas."""
NAMESPACE = "envoy.lb"
"""Metadata namespace that Envoy's load balancer reads."""
CHUNK_BYTES = 62 * 1024
"""Maximum size of a body's part in one message, in bytes; Envoy accepts messages of 64 KiB."""


def header_placed(endpoints: Sequence[str]) -> Any:
    """Return the answer to a request's head that sends it to these endpoints."""
    return _with_metadata(ProcessingResponse(request_headers={"response": _destination(endpoints)}), endpoints)


def body_placed(endpoints: Sequence[str]) -> Any:
    """Return the answer to a request's buffered body that sends it, unchanged, to these endpoints."""
    return _with_metadata(ProcessingResponse(request_body={"response": _destination(endpoints)}), endpoints)


def echoed(phase: str, data: bytes, *, last: bool) -> Iterator[Any]:
    """Yield the answers that pass on these bytes of a body, in full-duplex mode.

    phase: request_body or response_body. last: they end the body, and may be empty."""
    for start in range(0, max(len(data), 1), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        if not part and not last:
            return
        end = last and start + CHUNK_BYTES >= len(data)
        streamed = {"body": part, "end_of_stream": end}
        yield ProcessingResponse(**{phase: {"response": {"body_mutation": {"streamed_response": streamed}}}})


def passed(phase: str, data: bytes, mode: int, *, last: bool) -> Iterator[Any]:
    """Yield the answers that leave a message unchanged; mode: in which its body was sent."""
    if phase in ("request_body", "response_body") and mode == BodyMode.FULL_DUPLEX_STREAMED:
        yield from echoed(phase, data, last=last)
    else:
        yield ProcessingResponse(**{phase: {}})


def refused(error: KvferryError, path: str, more: Mapping[str, str]) -> Any:
    """Return the answer that ends a request with an error, in the format of the path's API.

    more: further headers."""
    headers = {"content-type": "application/json", **retry_headers(error.status, error.retry_after), **more}
    immediate = ImmediateResponse(
        status={"code": error.status}, body=dump(error_body(error, path)), details=f"kvferry_{error.code}"
    )
    for name, value in headers.items():
        _set(immediate.headers, name, value)
    return ProcessingResponse(immediate_response=immediate)


def _destination(endpoints: Sequence[str]) -> Any:
    common = CommonResponse(clear_route_cache=True)
    _set(common.header_mutation, DESTINATION, ",".join(endpoints))
    return common


def _with_metadata(response: Any, endpoints: Sequence[str]) -> Any:
    response.dynamic_metadata.update({NAMESPACE: {DESTINATION: ",".join(endpoints)}})
    return response


def _set(mutation: Any, name: str, value: str) -> None:
    header = {"key": name, "raw_value": value.encode("latin-1", "replace")}
    mutation.set_headers.add(header=header, append_action=OVERWRITE)
