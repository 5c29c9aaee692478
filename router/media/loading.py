"""MediaLoader: reads a request's images, audio and video from data URLs or hosts, and checks each file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Protocol, Self

from kvferry.protocol.media import MAX_PIXELS
from kvferry.router.long_work import SOURCE
from kvferry.router.media.data_urls import decoded, is_data_url, opened
from kvferry.router.media.formats import FORMATS, format_of, usual_name, wav_fault
from kvferry.router.media.image_size import UnreadableImage, image_size
from kvferry.router.media.jpeg_scans import check_scans
from kvferry.router.media.limits import LOADS_PER_TENANT, MAX_LOADS, MAX_SIDE, MAX_TOTAL_BYTES, MAX_TOTAL_PIXELS
from kvferry.router.media.parts import MediaFile, MediaPart
from kvferry.router.media.refusal import refused
from kvferry.router.media.tenant_places import TenantPlaces

UNKNOWN = ("", "image/*", "audio/*", "video/*", "application/octet-stream", "binary/octet-stream")
"""MIME types that servers declare for content of unknown type."""

LONG_CHARS = 2**20
"""Characters of a data URL above which one of a source is decoded at a time: slices of many would delay others."""


class Fetcher(Protocol):
    """Fetches the URLs that clients send."""

    def check(self, url: str, field: str) -> None:
        """Raise InvalidMedia if the URL's text shows that it may not be fetched."""

    async def fetch(self, url: str, field: str, tenant: str = "") -> tuple[bytes, str]:
        """Return the bytes of a URL and their declared MIME type; raise InvalidMedia naming the field."""
        ...

    async def close(self) -> None:
        """Close all connections."""


class NoFetcher:
    """Rejects all URLs."""

    def check(self, url: str, field: str) -> None:
        """Raise InvalidMedia."""
        raise refused(field, "must be a data URL: this server fetches nothing (--allowed-media-domains)")

    async def fetch(self, url: str, field: str, tenant: str = "") -> tuple[bytes, str]:
        """Raise InvalidMedia."""
        self.check(url, field)
        raise AssertionError

    async def close(self) -> None:
        """Do nothing."""


class MediaLoader:
    """Loads media of requests, through a fetcher where they are elsewhere."""

    def __init__(self, fetcher: Fetcher | None = None) -> None:
        self._fetcher = fetcher or NoFetcher()
        self._long, self._loads = TenantPlaces(MAX_LOADS, 1), TenantPlaces(MAX_LOADS, LOADS_PER_TENANT)

    @classmethod
    def of(cls, domains: str) -> Self:
        """Return a loader that fetches from these hosts, which are separated by commas; empty: from none."""
        if not (hosts := [host.strip() for host in domains.split(",") if host.strip()]):
            return cls()
        from kvferry.router.media.fetching import MediaFetcher  # its HTTP client takes memory

        return cls(MediaFetcher(hosts))

    async def close(self) -> None:
        """Close the fetcher's connections."""
        await self._fetcher.close()

    async def load(self, parts: Sequence[MediaPart], tenant: str = "") -> list[MediaFile]:
        """Return the parts' files in order; raise InvalidMedia naming the field and the bound.

        All data in the request is checked before anything is fetched."""
        books = _Books()
        for part in parts:
            if not is_data_url(part.url):
                self._fetcher.check(part.url, part.field)
        given = [await self._given(part, books) if is_data_url(part.url) else None for part in parts]
        away = [part for part, loaded in zip(parts, given, strict=True) if loaded is None]
        fetched = iter(await self._fetched(away, tenant, books) if away else ())
        return [loaded or next(fetched) for loaded in given]

    async def _given(self, part: MediaPart, books: _Books) -> MediaFile:
        """Return the file of a part whose data are in the request; decode long ones of a source one at a time.

        The first bytes are checked before the rest is decoded, which takes most of the time."""
        head, declared = opened(part.url, part.field)
        mime = usual_name(declared)
        mime = checked_format(part, head, format_of(head) if mime in UNKNOWN else mime)
        if part.modality == "image":
            await check_head(part, head, mime)
        async with self._long.taken(SOURCE.get()) if len(part.url) > LONG_CHARS else nullcontext():
            return await books.take(part, await decoded(part.url, part.field), mime)

    async def _fetched(self, parts: Sequence[MediaPart], tenant: str, books: _Books) -> list[MediaFile]:
        async def one(part: MediaPart) -> MediaFile:
            data, declared = await self._fetcher.fetch(part.url, part.field, tenant)
            mime = usual_name(declared)
            return await books.take(part, data, format_of(data) if mime in UNKNOWN else mime)

        async with self._loads.taken(tenant):
            tasks = [asyncio.create_task(one(part)) for part in parts]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


class _Books:
    """Sums over one request's media."""

    def __init__(self) -> None:
        self._bytes = self._pixels = 0

    async def take(self, part: MediaPart, data: bytes, mime: str) -> MediaFile:
        """Return the file of one part; raise InvalidMedia if it is not accepted."""
        found = checked_format(part, data, mime)
        self._bytes += len(data)
        if self._bytes > MAX_TOTAL_BYTES:
            raise refused(part.field, f"brings the request's media above {MAX_TOTAL_BYTES} bytes")
        if part.modality == "image":
            await self._take_pixels(part, data, mime)
        elif mime == "audio/wav" and (fault := wav_fault(data)):
            raise refused(part.field, f"is not a usable WAV file: {fault}")
        return MediaFile(part, found, data)

    async def _take_pixels(self, part: MediaPart, data: bytes, mime: str) -> None:
        try:
            width, height = image_size(data, mime)
            _check_size(part, width, height)
            if mime == "image/jpeg":
                await check_scans(data, width * height)
        except UnreadableImage as error:
            raise refused(part.field, str(error)) from error
        self._pixels += width * height
        if self._pixels > MAX_TOTAL_PIXELS:
            raise refused(part.field, f"brings the request's images above {MAX_TOTAL_PIXELS} pixels")


def checked_format(part: MediaPart, data: bytes, mime: str) -> str:
    """Return the MIME type that the first bytes show; raise InvalidMedia if it is unsupported or not declared."""
    allowed, found = FORMATS[part.modality], format_of(data)
    if found not in allowed:
        raise refused(part.field, f"is not a supported {part.modality} format: {', '.join(allowed)}")
    if mime != found:
        raise refused(part.field, f"is declared as {mime[:50]!r}, and its first bytes are those of {found}")
    return found


async def check_head(part: MediaPart, head: bytes, mime: str) -> None:
    """Raise InvalidMedia if the first bytes show that an image is too large or has too many scans."""
    with suppress(UnreadableImage):  # its header may be longer than these bytes
        _check_size(part, *image_size(head, mime))
    if mime == "image/jpeg":
        try:
            await check_scans(head)
        except UnreadableImage as error:
            raise refused(part.field, str(error)) from error


def _check_size(part: MediaPart, width: int, height: int) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise refused(
            part.field, f"has {width} x {height} pixels; an image may have {MAX_PIXELS}, and {MAX_SIDE} on a side"
        )
