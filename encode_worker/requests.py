"""Parsing and validation of EncodeRequest, the body of `POST /attempts/encode`."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.hashing import HASH_BYTES
from kvferry.protocol.media import MAX_ITEMS, MODALITIES, EncodeRequest, joined
from kvferry.runtime.http import read_messages


async def read_encode(request: Request) -> EncodeRequest:
    """Return an EncodeRequest with the data of its media.

    Raises InvalidRequest, WireError, RequestTooLarge, or Cancelled if the sender disconnects meanwhile."""
    found = await read_messages(request)
    if not found or not isinstance(found[0], EncodeRequest):
        raise InvalidRequest("the body must be an EncodeRequest", param="body")
    message = replace(found[0], media=joined(found[0].media, found[1:]))
    if len(message.root) != HASH_BYTES:
        raise InvalidRequest(f"root must have {HASH_BYTES} bytes, got {len(message.root)}", param="root")
    if not 1 <= len(message.media) <= MAX_ITEMS:
        raise InvalidRequest(f"media must be 1 to {MAX_ITEMS}, got {len(message.media)}", param="media")
    if not 0 <= message.deadline_s < float("inf"):
        raise InvalidRequest(f"deadline_s must be finite and at least 0, got {message.deadline_s}", param="deadline_s")
    for place, item in enumerate(message.media):
        if item.modality not in MODALITIES or not item.hash or item.length < 1:
            raise InvalidRequest(f"media[{place}] must have a modality, a hash and a length", param=f"media[{place}]")
    return message
