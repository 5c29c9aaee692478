"""StoredResponses: stores, fetches and deletes a tenant's responses, and resolves the earlier items a request names."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic_core import from_json, to_json

from kvferry.cluster_state.responses import ResponseStore
from kvferry.protocol.errors import InvalidRequest, KvferryError, NotFound, RegistryUnavailable
from kvferry.router.api.responses.body import ResponsesBody
from kvferry.router.api.responses.items import Item, normal, response_of
from kvferry.router.api.responses.request import ResponsesChat, ResponsesRequest
from kvferry.router.api.responses.truncation import truncated_chat
from kvferry.router.api.served_models import ServedModels
from kvferry.router.request_context import RequestContext

log = logging.getLogger("kvferry.responses")

MAX_RECORD_BYTES = 16 * 2**20
"""Largest record, in bytes; reading one blocks the event loop for a few milliseconds per MiB."""
_ID = re.compile(r"resp_[A-Za-z0-9._:-]{1,160}")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with its input items and all earlier items; `size` is its record's size in bytes, once read."""

    response: dict[str, Any]
    input: list[Item]
    history: list[Item]
    size: int = 0

    def conversation(self) -> list[Item]:
        """Return all items: earlier ones, input and output."""
        return [*self.history, *self.input, *self.response["output"]]


class StoredResponses:
    """Stored responses of one router; without a store nothing is stored.

    A failing store never fails a response that a client waits for. The response is sent, not stored, and a warning is
    logged."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    async def translate(self, call: RequestContext, body: ResponsesBody, pools: ServedModels) -> ResponsesChat:
        """Translate a request into a chat, including the conversation that it continues.

        Raises KvferryError: NotFound if the earlier response is not stored."""
        pool = pools.pool(body.model)
        name = f"{call.id}-{call.identity.nonce}"
        kept = self._store is not None and body.store is not False
        history: list[Item] = []
        earlier = 0
        if body.previous_response_id:
            previous = await self._continued(call.tenant, body.previous_response_id)
            history, earlier = previous.conversation(), previous.size
        items, referred = await self._resolved(call.tenant, normal(body.input, name))
        keep = partial(self._keep, call.tenant, items, history)
        request = ResponsesRequest(name, body, items, history, keep, kept, call.identity.created)
        chat = await truncated_chat(request, pool, call.tenant) if body.truncation == "auto" else request.chat()
        chat.earlier = earlier + referred
        return chat

    def recorded(self, body: ResponsesBody) -> bool:
        """Return whether a request's tokens are recorded, so that its events can be fetched later."""
        return self._store is not None and bool(body.background or (body.stream and body.store is not False))

    async def get(self, tenant: str, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Return a stored response; raise NotFound, or RegistryUnavailable if the store does not answer."""
        record = None
        if self._store is not None and _ID.fullmatch(response_id):
            record = await self._store.get(tenant, response_id)
        if record is None:
            raise NotFound(f"no response {response_id!r} is stored here{self._why()}", param=param)
        return StoredResponse(**from_json(record), size=len(record))

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a stored response; raise as `get`."""
        found = self._store is not None and _ID.fullmatch(response_id) is not None
        if self._store is None or not found or not await self._store.delete(tenant, response_id):
            raise NotFound(f"no response {response_id!r} is stored here{self._why()}")

    async def put(self, tenant: str, kept: StoredResponse) -> bool:
        """Store a response if possible and return whether it is stored; never raise."""
        if self._store is None:
            return False
        name = kept.response["id"]
        try:
            record = to_json({"response": kept.response, "input": kept.input, "history": kept.history})
            if len(record) <= MAX_RECORD_BYTES and await self._store.put(tenant, name, record):
                return True
            log.warning("%s is not stored: its %d bytes exceed the limit", name, len(record))
        except KvferryError as error:
            log.warning("%s is not stored: %s", name, error)
        return False

    async def _keep(self, tenant: str, items: list[Item], history: list[Item], response: dict[str, Any]) -> None:
        if response["store"]:
            await self.put(tenant, StoredResponse(response, items, history))

    async def _continued(self, tenant: str, response_id: str) -> StoredResponse:
        field = "previous_response_id"
        try:
            kept = await self.get(tenant, response_id, param=field)
        except RegistryUnavailable as error:
            raise RegistryUnavailable(f"{field}: the stored responses cannot be read: {error}", param=field) from error
        if kept.response["status"] in ("in_progress", "queued"):
            raise InvalidRequest(f"{field}: {response_id!r} is still in progress", param=field)
        return kept

    async def _resolved(self, tenant: str, items: list[Item]) -> tuple[list[Item], int]:
        """Replace references by the items they name; return the items and the size of the records in bytes.

        Each item may be named only once, so that a short request cannot expand to any size."""
        found: dict[str, StoredResponse] = {}
        named: set[str] = set()
        size = 0
        for place, item in enumerate(items):
            if item["type"] != "item_reference":
                continue
            field, own = f"input[{place}]", response_of(item["id"])
            missing = NotFound(f"{field}.id: no item {item['id']!r} is stored here{self._why()}", param=f"{field}.id")
            if own is None:
                raise missing
            if item["id"] in named:
                raise InvalidRequest(f"{field}.id: {item['id']!r} is referenced twice", param=f"{field}.id")
            named.add(item["id"])
            name, is_input, number = own
            if name not in found:
                found[name] = await self.get(tenant, name, param=f"{field}.id")
                size += found[name].size
            if size > MAX_RECORD_BYTES:
                message = f"{field}: the referenced items' responses have more than {MAX_RECORD_BYTES} bytes in total"
                raise InvalidRequest(message, param=field)
            there = found[name].input if is_input else found[name].response["output"]
            if number >= len(there) or there[number]["id"] != item["id"]:
                raise missing
            items[place] = there[number]
        return items, size

    def _why(self) -> str:
        return "" if self._store is not None else "; this server stores no responses"
