"""Pagination by `limit` and `after` of the file and batch lists, in OpenAI's format."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from kvferry.protocol.errors import InvalidRequest


def page(items: list[dict[str, Any]], request: Request, most: int) -> dict[str, Any]:
    """Return one page: `limit` items after the item with id `after`; raise InvalidRequest."""
    limit, after = request.query_params.get("limit", str(most)), request.query_params.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise InvalidRequest(f"limit must be 1 to {most}", param="limit")
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        items = items[places[0] + 1 :] if places else []
    shown = items[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > len(shown),
    }
