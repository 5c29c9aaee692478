"""Pagination by `limit` and `after` of the file and batch lists, in OpenAI's format."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from kvferry.protocol.errors import InvalidRequest


def page(items: list[dict[str, Any]], request: Request, max_limit: int) -> dict[str, Any]:
    """Return one page: `limit` items after the item with id `after`; raise InvalidRequest."""
    limit, after = request.query_params.get("limit", str(max_limit)), request.query_params.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= max_limit):
        raise InvalidRequest(f"limit must be 1 to {max_limit}", param="limit")
    if after is not None:
        indices = [index for index, item in enumerate(items) if item["id"] == after]
        items = items[indices[0] + 1 :] if indices else []
    shown = items[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > len(shown),
    }
