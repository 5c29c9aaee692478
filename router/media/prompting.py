"""MediaPrompter: has a node render chats with media into prompts; MediaBudget: bytes of media that tenants may hold."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from weakref import finalize

from kvferry.protocol.errors import DeadlineExceeded, InvalidRequest, Overloaded
from kvferry.protocol.media import COMPRESSED_AUDIO, RenderRequest
from kvferry.router.dispatch.interface import MediaServices
from kvferry.router.dispatch.prompt_media import RenderedMedia
from kvferry.router.media.chat import MediaChat
from kvferry.router.media.formats import COMPRESSED
from kvferry.router.media.limits import MAX_HELD_BYTES, MAX_RENDERS, RENDERS_PER_TENANT
from kvferry.router.media.loading import MediaLoader
from kvferry.router.media.parts import MediaFile
from kvferry.router.media.refusal import InvalidMedia, refused
from kvferry.router.media.tenant_places import TenantPlaces
from kvferry.router.request_context import RequestContext


class MediaBudget:
    """Bytes of media that requests hold, as sent and as prepared: of all tenants, and of one at most half as much.

    An eighth is left to tenants that hold less than a sixteenth, so that no two can push out all others."""

    def __init__(self, limit: int = MAX_HELD_BYTES) -> None:
        self._limit, self._held = limit, Counter[str]()

    @property
    def held(self) -> int:
        """Return the bytes of all tenants."""
        return self._held.total()

    def check(self, tenant: str, more: int = 1) -> None:
        """Raise Overloaded if there is no room for `more` bytes."""
        own, limit = self._held[tenant] + more, self._limit
        room = limit if not tenant or own <= limit // 16 else limit - limit // 8
        if self.held + more > room or (tenant and own > limit // 2):
            raise Overloaded(
                "the media of waiting and running requests fill their share of this router's memory", retry_after=1.0
            )

    def hold(self, tenant: str, holder: object, size: int) -> None:
        """Count `size` bytes until `holder` is garbage-collected. Raises Overloaded if there is no room."""
        self.check(tenant, size)
        self._held[tenant] += size
        finalize(holder, self._drop, tenant, size).atexit = False

    def _drop(self, tenant: str, size: int) -> None:
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]


class MediaPrompter:
    """Makes prompts of one model's chats with media. Belongs to one asyncio loop; the owner must call `close`.

    template: chat template in place of the model's own; empty: the model's."""

    def __init__(self, loader: MediaLoader, nodes: MediaServices, template: str = "") -> None:
        self._loader, self._nodes, self._template, self.budget = loader, nodes, template, MediaBudget()
        self._renders = TenantPlaces(MAX_RENDERS, RENDERS_PER_TENANT)

    async def close(self) -> None:
        """Close all connections for fetching."""
        await self._loader.close()

    async def prompt(self, chat: MediaChat, call: RequestContext, adapter: str, holder: object) -> RenderedMedia:
        """Return the prompt. adapter: id of the LoRA adapter; empty: none. holder: keeps the media as they were sent.

        Raises InvalidRequest naming the field, Overloaded, NoNodes, DeadlineExceeded, or the making node's error."""
        self._check(chat, adapter)
        self.budget.hold(call.tenant, holder, chat.size)
        try:
            async with asyncio.timeout(call.deadline - time.monotonic()):
                files = await self._loader.load(chat.parts, call.tenant)
                for file in files:
                    self.budget.hold(call.tenant, file, len(file.data))
                async with self._renders.taken(call.tenant):
                    found = await self._rendered(chat, files, call, adapter)
        except TimeoutError:
            raise DeadlineExceeded(f"not finished after {call.deadline - call.arrival:.3g} s") from None
        self.budget.hold(call.tenant, found.media, found.media.size)
        return found

    async def _rendered(
        self, chat: MediaChat, files: Sequence[MediaFile], call: RequestContext, adapter: str
    ) -> RenderedMedia:
        left_s = max(0.0, call.deadline - time.monotonic())
        request = RenderRequest(chat.body(files), adapter, left_s, self._template, tuple(file.data for file in files))
        return await self._nodes.render(request, self._abilities(chat, files, adapter))

    def _check(self, chat: MediaChat, adapter: str) -> None:
        """Raise InvalidRequest for the first medium that no node accepts, or if no node accepts all of them."""
        for part in {part.modality: part for part in reversed(chat.parts)}.values():
            try:
                self._nodes.check((part.modality,), adapter)
            except InvalidRequest as error:
                why = f"content parts of type {part.kind!r} are not supported: {error.message}"
                raise InvalidMedia(f"{part.part}: {why}", param=part.part) from error
        self._nodes.check(chat.modalities, adapter)

    def _abilities(self, chat: MediaChat, files: Sequence[MediaFile], adapter: str) -> frozenset[str]:
        """Return what the making node must be able to do; raise InvalidMedia for FLAC and Ogg that no node accepts."""
        file = next((file for file in files if file.mime in COMPRESSED), None)
        if file is None:
            return chat.modalities
        needed = chat.modalities | {COMPRESSED_AUDIO}
        try:
            self._nodes.check(needed, adapter)
        except InvalidRequest as error:
            raise refused(file.part.field, "must be WAV or MP3: no node of the model bounds FLAC and Ogg") from error
        return needed
