"""Errors in the Messages API's format."""

from __future__ import annotations

from typing import Any

from kvferry.protocol.errors import KvferryError

PLACE = "/v1/messages"
"""Path of the Messages API."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_error(error: KvferryError) -> dict[str, Any]:
    """Return `{"type": "error", "error": {type, message}}` with a type by status; the message names the field."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    named = not error.param or error.param in error.message
    message = error.message if named else f"{error.param}: {error.message}"
    return {"type": "error", "error": {"type": kind, "message": message}}
