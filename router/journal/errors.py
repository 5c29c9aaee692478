"""Errors of requests that are to be resumed."""

from __future__ import annotations

from kvferry.protocol.errors import InvalidRequest


class KeyReused(InvalidRequest):
    """The idempotency key, or the id of an event, belongs to another request."""

    status, code = 422, "idempotency_key_reused"


class NotResumable(InvalidRequest):
    """The request would not continue with the same tokens: its prompt is another one now."""

    status, code = 409, "not_resumable"
