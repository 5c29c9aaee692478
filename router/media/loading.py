"""Loading of a request's images, audio and video: each is checked and becomes a data URL for the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Self

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.media.data_urls import data_url, decoded, is_data_url
from kvferry.router.media.formats import FORMATS, format_of, usual_name, wav_fault
from kvferry.router.media.image_size import UnreadableImage, image_size
from kvferry.router.media.limits import MAX_PIXELS, MAX_SIDE, MAX_TOTAL_BYTES, MAX_TOTAL_PIXELS
from kvferry.router.media.parts import MediaPart

UNKNOWN = ("", "application/octet-stream", "binary/octet-stream")
"""MIME types of servers that do not know what they send."""


class Fetcher(Protocol):
    """Fetches what URLs of clients name."""

    def check(self, url: str, field: str) -> None:
        """Raise InvalidRequest unless the URL may be fetched, as far as its text shows."""

    async def fetch(self, url: str, field: str, tenant: str = "") -> tuple[bytes, str]:
        """Return the bytes of a URL and their declared MIME type; raise InvalidRequest naming the field."""
        ...

    async def close(self) -> None:
        """Close all connections."""


class NoFetcher:
    """Refuses all URLs."""

    def check(self, url: str, field: str) -> None:
        """Raise InvalidRequest."""
        raise InvalidRequest(
            f"{field} must be a data URL: this server fetches nothing (--allowed-media-domains)", param=field
        )

    async def fetch(self, url: str, field: str, tenant: str = "") -> tuple[bytes, str]:
        """Raise InvalidRequest."""
        self.check(url, field)
        raise AssertionError

    async def close(self) -> None:
        """Do nothing."""


class MediaLoader:
    """Loads media of requests, through a fetcher where they are elsewhere."""

    def __init__(self, fetcher: Fetcher | None = None) -> None:
        self._fetcher = fetcher or NoFetcher()

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

    async def load(self, parts: Sequence[MediaPart], tenant: str = "") -> list[MediaPart]:
        """Return the parts with data URLs; raise InvalidRequest naming the field and the bound.

        All data in the request is checked before anything is fetched."""
        books = _Books()
        for part in parts:
            if not is_data_url(part.url):
                self._fetcher.check(part.url, part.field)
        loaded = {}
        for part in parts:
            if is_data_url(part.url):
                data, mime = await decoded(part.url, part.field)
                found = books.take(part, data, usual_name(mime))
                loaded[part] = replace(part, url=f"data:{found};base64,{part.url.partition(',')[2]}")
        away = [part for part in parts if part not in loaded]
        fetched = await self._fetched(away, tenant, books)
        return [loaded.get(part) or fetched[part] for part in parts]

    async def _fetched(self, parts: Sequence[MediaPart], tenant: str, books: _Books) -> dict[MediaPart, MediaPart]:
        async def one(part: MediaPart) -> tuple[MediaPart, MediaPart]:
            data, declared = await self._fetcher.fetch(part.url, part.field, tenant)
            mime = usual_name(declared)
            found = books.take(part, data, format_of(data) if mime in UNKNOWN else mime)
            return part, replace(part, url=data_url(data, found))

        tasks = [asyncio.create_task(one(part)) for part in parts]
        try:
            return dict(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Books:
    """Sums over one request's media."""

    def __init__(self) -> None:
        self._bytes = self._pixels = 0

    def take(self, part: MediaPart, data: bytes, mime: str) -> str:
        """Return the MIME type of one part's data; raise InvalidRequest for what is not taken."""
        allowed, found = FORMATS[part.modality], format_of(data)
        if found not in allowed:
            raise _refused(part, f"is no {part.modality} that is supported: {', '.join(allowed)}")
        if mime != found:
            raise _refused(part, f"is declared as {mime[:50]!r}, and its first bytes are those of {found}")
        self._bytes += len(data)
        if self._bytes > MAX_TOTAL_BYTES:
            raise _refused(part, f"brings the request's media above {MAX_TOTAL_BYTES} bytes")
        if part.modality == "image":
            self._take_pixels(part, data, mime)
        elif mime == "audio/wav" and (fault := wav_fault(data)):
            raise _refused(part, f"is no usable WAV file: {fault}")
        return found

    def _take_pixels(self, part: MediaPart, data: bytes, mime: str) -> None:
        try:
            width, height = image_size(data, mime)
        except UnreadableImage as error:
            raise _refused(part, str(error)) from error
        if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
            raise _refused(
                part, f"has {width} x {height} pixels; an image may have {MAX_PIXELS}, and {MAX_SIDE} on a side"
            )
        self._pixels += width * height
        if self._pixels > MAX_TOTAL_PIXELS:
            raise _refused(part, f"brings the request's images above {MAX_TOTAL_PIXELS} pixels")


def _refused(part: MediaPart, why: str) -> InvalidRequest:
    return InvalidRequest(f"{part.field} {why}", param=part.field)
