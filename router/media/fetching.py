"""MediaFetcher: fetches media over HTTP(S) from allowed hosts, at public addresses only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from urllib.parse import urljoin, urlsplit

import httpx

from kvferry.router.media.addresses import Resolver, is_public
from kvferry.router.media.limits import (
    FETCH_S,
    FETCHES_PER_TENANT,
    MAX_FETCHES,
    MAX_MEDIA_BYTES,
    MAX_REDIRECTS,
    MAX_URL_CHARS,
)
from kvferry.router.media.refusal import refused
from kvferry.router.media.tenant_places import TenantPlaces
from kvferry.runtime.address import resolve

PORTS = {"http": 80, "https": 443}
"""Ports of the schemes; URLs with other schemes are rejected."""
_REDIRECTS = (301, 302, 303, 307, 308)


class MediaFetcher:
    """Fetches the URLs that clients send. Belongs to one asyncio loop; the owner must call `close`.

    hosts    names of hosts from which it may fetch; an empty set forbids all
    resolve  returns the addresses of a host
    allowed  returns whether an address may be connected to
    ports    port of each scheme

    A name is resolved once, all of its addresses are checked, and the connection goes to one of these: a second answer
    of the name server cannot lead elsewhere. Proxies of the environment are not used."""

    def __init__(
        self,
        hosts: Collection[str],
        resolve: Resolver = resolve,
        allowed: Callable[[str], bool] = is_public,
        ports: dict[str, int] = PORTS,
    ) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._resolve, self._allowed, self._ports = resolve, allowed, ports
        self._places = TenantPlaces(MAX_FETCHES, FETCHES_PER_TENANT)
        self._client: httpx.AsyncClient | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()

    def check(self, url: str, field: str) -> None:
        """Raise InvalidMedia if the URL's text shows that it may not be fetched."""
        self._target(url, field)

    async def fetch(self, url: str, field: str, tenant: str = "") -> tuple[bytes, str]:
        """Return the bytes of a URL and their declared MIME type.

        Raises InvalidMedia naming the field."""
        try:
            async with asyncio.timeout(FETCH_S), self._places.taken(tenant):
                return await self._followed(url, field)
        except TimeoutError:
            raise refused(field, f"was not fetched within {FETCH_S:g} s") from None
        except httpx.HTTPError as error:
            raise refused(field, f"cannot be fetched: {type(error).__name__}") from error

    async def _followed(self, url: str, field: str) -> tuple[bytes, str]:
        for _ in range(MAX_REDIRECTS + 1):
            async with self._answer(url, field) as answer:
                if answer.status_code not in _REDIRECTS:
                    return await _content(answer, field), answer.headers.get("content-type", "")
                url = urljoin(url, answer.headers.get("location", ""))
        raise refused(field, f"is redirected more than {MAX_REDIRECTS} times")

    @asynccontextmanager
    async def _answer(self, url: str, field: str) -> AsyncIterator[httpx.Response]:
        """Ask one checked address of the URL's host, by its name in the header and in TLS."""
        host, port = self._target(url, field)
        target = httpx.URL(url).copy_with(host=await self._address(host, port, field), port=port, fragment=None)
        if self._client is None:
            self._client = httpx.AsyncClient(
                trust_env=False,
                follow_redirects=False,
                timeout=FETCH_S,
                limits=httpx.Limits(max_keepalive_connections=0),
            )
        request = self._client.build_request(
            "GET",
            target,
            headers={"host": host if port in PORTS.values() else f"{host}:{port}", "accept-encoding": "identity"},
            extensions={"sni_hostname": host},
        )
        answer = await self._client.send(request, stream=True)
        try:
            yield answer
        finally:
            await answer.aclose()

    def _target(self, url: str, field: str) -> tuple[str, int]:
        """Return host and port of a URL that may be fetched; raise InvalidMedia."""
        if len(url) > MAX_URL_CHARS:
            raise refused(field, f"is longer than {MAX_URL_CHARS} characters")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
            named = httpx.URL(url).host.rstrip(".")
        except (ValueError, httpx.InvalidURL):
            raise refused(field, "is not a valid URL") from None
        if parts.scheme not in self._ports or not host or host != named:
            raise refused(field, "must be a data URL, or an http or https URL of an allowed host")
        if host not in self._hosts:
            raise refused(field, f"names the host {host[:100]!r}, which is not in --allowed-media-domains")
        if parts.username is not None or port not in (None, self._ports[parts.scheme]):
            raise refused(field, "must have neither a user nor a port")
        return host, self._ports[parts.scheme]

    async def _address(self, host: str, port: int, field: str) -> str:
        try:
            found = await self._resolve(host, port)
        except (OSError, UnicodeError):
            found = []
        if not found:
            raise refused(field, f"names the host {host!r}, which has no address")
        if not all(map(self._allowed, found)):
            raise refused(field, f"names the host {host!r}, whose address is not public")
        return found[0]


async def _content(answer: httpx.Response, field: str) -> bytes:
    if answer.status_code != 200:
        raise refused(field, f"was answered with status {answer.status_code}")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise refused(field, "was answered in a compressed form, which the request did not accept")
    declared, data = answer.headers.get("content-length", ""), bytearray()
    if declared.isdecimal() and int(declared) > MAX_MEDIA_BYTES:
        raise refused(field, f"has more than {MAX_MEDIA_BYTES} bytes")
    async for part in answer.aiter_raw():
        data += part
        if len(data) > MAX_MEDIA_BYTES:
            raise refused(field, f"has more than {MAX_MEDIA_BYTES} bytes")
    return bytes(data)
