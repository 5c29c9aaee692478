"""One request of a client that comes back: where its answer breaks off, it is taken up at the next router."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from kvferry.simulate.rate_probe import lines

PATH = "/v1/completions"
PATIENCE_S = 60.0
"""A client waits this long for its next token, or its answer; longer is an error."""
SILENCE_S = 1.0
"""A client that comes back waits this long for the next byte of a stream, then it asks the next router: a living one
writes a comment after 0.5 s."""
AGAIN_S = 0.1
"""Seconds between two tries."""
_CODES = ("not_found", "unavailable", "no_nodes", "registry_unavailable")
PASSING = ("404", "503", *(f"in stream: {code} " for code in _CODES))
"""Beginnings of refusals that a client which comes back waits out."""
BROKEN = (httpx.HTTPError, OSError)

Tokens = dict[int, tuple[int, ...]]
"""Token ids of each choice."""


class Answered(Exception):
    """The server said no, or broke its word; the message says how."""


class Broken(Exception):
    """The answer ended before its end."""


class Asking:
    """A request and what came of its answer so far.

    count       called with the number of tokens of each event
    trace       its trace id, the same at each try
    tries       how often it was sent; began_anew: how often nothing was kept of what had come
    """

    def __init__(self, http: httpx.AsyncClient, body: Mapping[str, Any], count: Callable[[int], None]) -> None:
        self._http, self._body, self._count = http, body, count
        self._key, self._last_id = str(uuid.uuid4()), ""
        self.trace = uuid.uuid4().hex
        self._found: dict[int, list[int]] = defaultdict(list)
        self.began, self.first_s, self.route = time.monotonic(), 0.0, ""
        self.tries = self.began_anew = 0

    @property
    def tokens(self) -> Tokens:
        return {index: tuple(ids) for index, ids in self._found.items()}

    async def once(self, url: str) -> None:
        """Ask one router, and do not come back. Raises Answered, Broken, httpx.HTTPError."""
        await self._send(url, {})

    async def until_answered(self, urls: Sequence[str]) -> None:
        """Ask these routers in turn until the answer is whole. Raises Answered."""
        until, why = time.monotonic() + PATIENCE_S, ""
        for url in itertools.cycle(urls):
            heard = self._last_id
            try:
                return await self._send(url, self._headers(), SILENCE_S if self._body.get("stream") else PATIENCE_S)
            except (Broken, *BROKEN) as error:
                why = f"{type(error).__name__}: {error}"
            except Answered as answered:
                why = str(answered)
                if self.tries == 1 or not why.startswith(PASSING):
                    raise
                if "no events of" in why:
                    self._begin_anew()
            if self._last_id != heard:
                until = time.monotonic() + PATIENCE_S
            elif time.monotonic() > until:
                raise Answered(f"no answer in {PATIENCE_S:.0f} s, the last try: {why}")
            await asyncio.sleep(AGAIN_S)

    def _headers(self) -> dict[str, str]:
        told = {"idempotency-key": self._key, "accept": "text/event-stream"}
        return told | ({"last-event-id": self._last_id} if self._last_id else {})

    def _begin_anew(self) -> None:
        """The store lost what was recorded: the request is a new one."""
        self._key, self._last_id = str(uuid.uuid4()), ""
        self._found.clear()
        self.began_anew += 1

    async def _send(self, url: str, headers: Mapping[str, str], silence_s: float = PATIENCE_S) -> None:
        self.tries += 1
        headers = {"traceparent": f"00-{self.trace}-{self.trace[:16]}-01", **headers}
        timeout = httpx.Timeout(PATIENCE_S, read=silence_s)
        async with self._http.stream("POST", url + PATH, json=self._body, headers=headers, timeout=timeout) as response:
            self.route = self.route or response.headers.get("x-kvferry-route", "")
            if response.status_code != 200:
                told = json.loads(await response.aread())["error"]
                raise Answered(f"{response.status_code} {told['code']}: {told['message']}")
            if not self._body.get("stream"):
                whole = json.loads(await response.aread())
                self._take(whole)
                return
            place = ""
            async for line in lines(response):
                if line.startswith(b"id: "):
                    place = line[4:].decode()
                elif line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
                    self._last_id = place
                elif line == b"data: [DONE]":
                    return
        raise Broken("the stream ended without its end")

    def _take(self, part: Mapping[str, Any]) -> None:
        if "error" in part:
            raise Answered(f"in stream: {part['error'].get('code')} {part['error'].get('message')}")
        made = 0
        for choice in part.get("choices") or ():
            ids = choice.get("token_ids") or ()
            self._found[choice["index"]] += ids
            made += len(ids)
        if made or not self._body.get("stream"):
            self.first_s = self.first_s or time.monotonic() - self.began
            self._count(made)


def urls_from(urls: Mapping[str, str], first: str) -> list[str]:
    """All routers' URLs, from that one on."""
    names = list(urls)
    at = names.index(first)
    return [urls[name] for name in names[at:] + names[:at]]
