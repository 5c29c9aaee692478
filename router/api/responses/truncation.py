"""`truncation: auto`: drops the oldest turns of a conversation that exceeds the context."""

from __future__ import annotations

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.responses.items import Item
from kvferry.router.api.responses.request import ResponsesChat, ResponsesRequest
from kvferry.router.api.served_models import ServedModel
from kvferry.router.text.encoding import Bound


async def fitted(asked: ResponsesRequest, pool: ServedModel) -> ResponsesChat:
    """The chat without as few of its oldest turns as leave room for the output that was asked for, or one token.

    What the system said stays, and so does the last turn, whatever its length."""
    whole = [*asked.history, *asked.items]
    starts = [place for place, item in enumerate(whole) if item["type"] == "message" and item["role"] == "user"]
    cuts = [0, *(place for place in starts if place)]
    room = pool.max_model_len - max(asked.body.max_output_tokens or 1, 1)
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits(asked.chat(_from(whole, cuts[middle])), pool, room):
            high = middle
        else:
            low = middle + 1
    return asked.chat(_from(whole, cuts[low]))


def _from(items: list[Item], cut: int) -> list[Item]:
    said = [item for item in items[:cut] if item["type"] == "message" and item["role"] in ("system", "developer")]
    return [*said, *items[cut:]]


async def _fits(chat: ResponsesChat, pool: ServedModel, room: int) -> bool:
    """Templates may make shorter prompts of longer chats, but none that matters does."""
    (prompt,) = await pool.encoder.beside(chat.prompts, pool.text)
    assert isinstance(prompt, str)
    try:
        (ids,) = await pool.encoder.encode([prompt], Bound(room, "input"), add_special_tokens=chat.marks_texts())
    except InvalidRequest:  # it is too long by its characters alone
        return False
    return len(ids) <= room
