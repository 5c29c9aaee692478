"""Conversion of an engine server's refusals and reported failures into kvferry's errors."""

from __future__ import annotations

import json
from typing import Any

from kvferry.protocol.errors import InvalidRequest, KvferryError, Overloaded, StepFailed


def refusal(status: int, body: bytes, retry_after: str | None) -> KvferryError:
    """Return the error for an engine's refusal: of the request's contents, for now, or of this request alone."""
    reported = f"the engine answered {status}: {_message(body)}"
    if status in (400, 413, 422):
        return InvalidRequest(reported)
    return Overloaded(reported, retry_after=1.0) if status in (429, 503) else StepFailed(reported)


def failure(error: Any) -> KvferryError:
    """Return the error for one that the engine sends inside an answer with status 200."""
    reported = error if isinstance(error, dict) else {"message": str(error)}
    kind = InvalidRequest if reported.get("code") == 400 else StepFailed
    return kind(f"the engine failed: {str(reported.get('message', ''))[:500]}")


def _message(body: bytes) -> str:
    """Return the message of an error's body in any engine's form, shortened."""
    try:
        found = json.loads(body)
        found = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
        found = found.get("message", found) if isinstance(found, dict) else found
    except ValueError:
        found = body.decode("utf-8", "replace")
    return str(found)[:500]
