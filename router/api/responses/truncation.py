"""Implements `truncation: auto`: drops the oldest turns of a conversation that exceeds the context."""

from __future__ import annotations

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.responses.items import Item
from kvferry.router.api.responses.request import ResponsesChat, ResponsesRequest
from kvferry.router.api.served_models import ServedModel
from kvferry.router.text.encoding import Bound


async def truncated_chat(request: ResponsesRequest, pool: ServedModel, tenant: str) -> ResponsesChat:
    """Return the chat without the fewest oldest turns such that the requested output fits, or at least one token.

    System and developer messages and the last turn always stay."""
    whole = [*request.history, *request.items]
    starts = [place for place, item in enumerate(whole) if item["type"] == "message" and item["role"] == "user"]
    cuts = [0, *(place for place in starts if place)]
    room = pool.max_model_len - max(request.body.max_output_tokens or 1, 1)
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits(request.chat(_from(whole, cuts[middle])), pool, room, tenant):
            high = middle
        else:
            low = middle + 1
    return request.chat(_from(whole, cuts[low]))


def _from(items: list[Item], cut: int) -> list[Item]:
    roles = ("system", "developer")
    return [*(item for item in items[:cut] if item["type"] == "message" and item["role"] in roles), *items[cut:]]


async def _fits(chat: ResponsesChat, pool: ServedModel, room: int, tenant: str) -> bool:
    """Return whether the chat fits; assumes that longer chats give longer prompts, as in all relevant templates."""
    (prompt,) = await pool.prompts(chat, tenant)
    assert isinstance(prompt, str)
    try:
        (ids,) = await pool.encoder.encode([prompt], Bound(room, "input"), add_special_tokens=chat.marks_texts())
    except InvalidRequest:  # the number of characters alone exceeds the limit
        return False
    return len(ids) <= room
