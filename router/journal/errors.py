"""Errors of requests that cannot be resumed: an idempotency key used for another request, or a changed prompt."""

from __future__ import annotations

from kvferry.protocol.errors import InvalidRequest


class KeyReused(InvalidRequest):
    """The idempotency key, or the id of an event, belongs to another request."""

    status, code = 422, "idempotency_key_reused"


class NotResumable(InvalidRequest):
    """The request would not continue with the same tokens, since its prompt has changed."""

    status, code = 409, "not_resumable"
