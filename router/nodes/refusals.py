"""What a node's refusal says, whichever client read it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from protocol.errors import KvferryError, from_body


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> KvferryError:
    """The error in the body of a response with a status of 400 or more. `headers` have names in lower case."""
    try:
        error = from_body(json.loads(body), f"HTTP status {status}")
    except ValueError:
        error = KvferryError(f"HTTP status {status}")
    with contextlib.suppress(KeyError, ValueError):
        error.retry_after = float(headers["retry-after"])
    return error
