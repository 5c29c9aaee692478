"""Translates an error into the Messages API's error object; Claude Code reads its context-length messages."""

from __future__ import annotations

from typing import Any

from kvferry.protocol.errors import ContextLengthExceeded, KvferryError

PATH = "/v1/messages"
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
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def _message(error: KvferryError) -> str:
    """Return the message, which names the field.

    For a full context it begins as in Anthropic's API: Claude Code reads the numbers, and then asks for fewer tokens
    or shortens the conversation."""
    if not isinstance(error, ContextLengthExceeded):
        named = not error.param or error.param in error.message
        return error.message if named else f"{error.param}: {error.message}"
    if error.counted is None:
        return f"prompt is too long: {error.message}"
    prompt, output, limit = error.counted
    if prompt < limit:
        return f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}; {error.message}"
    return f"prompt is too long: {prompt} tokens > {limit} maximum; {error.message}"
