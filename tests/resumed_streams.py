"""Clients whose streams break and are taken up again, and a gateway to the first router that lives."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.waiting import wait_for

RESPONSES = "/v1/responses"


@dataclass
class Heard:
    """Events of a stream so far."""

    events: list[str] = field(default_factory=list)

    @property
    def last_id(self) -> str:
        return [line[4:] for event in self.events for line in event.splitlines() if line.startswith("id: ")][-1]

    def texts(self) -> dict[int, str]:
        """Return the text of each choice."""
        found: dict[int, str] = {}
        lines = [line[6:] for event in self.events for line in event.splitlines() if line.startswith("data: {")]
        for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
            said = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + said
        return found

    @property
    def is_whole(self) -> bool:
        return bool(self.events) and self.events[-1].endswith("[DONE]")


def listen(
    heard: Heard,
    url: str,
    path: str,
    body: dict[str, Any],
    *,
    events: int = 0,
    then: Callable[[], object] | None = None,
    **headers: str,
) -> int:
    """Stream until the end or a break; return the status. After so many events call `then`, or leave."""
    given = {"accept": "text/event-stream", **{name.replace("_", "-"): text for name, text in headers.items()}}
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.stream("POST", url + path, json={**body, "stream": True}, headers=given, timeout=60) as response,
    ):
        if response.status_code != 200:
            return response.status_code
        rest = ""
        for text in response.iter_text():
            *whole, rest = (rest + text).split("\n\n")
            heard.events += whole
            if events and len(heard.events) >= events:
                if then is None:
                    return 200
                then()
                events = 0
    return 200


def resumed(heard: Heard, url: str, path: str, body: dict[str, Any]) -> None:
    """Take a stream up again, as often as it takes."""
    until = time.monotonic() + 30
    while not heard.is_whole:
        assert time.monotonic() < until
        status = listen(heard, url, path, body, last_event_id=heard.last_id)
        assert status in (200, 503)
        time.sleep(0.05)


def background(url: str, tokens: int, seed: int) -> str:
    """Begin a background response; return its id."""
    body = {"input": "Tell me a long story.", "max_output_tokens": tokens, "temperature": 1.0, "seed": seed}
    body |= {"ignore_eos": True, "background": True}
    response = httpx.post(url + RESPONSES, json=body, timeout=30)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def output(response: dict[str, Any]) -> str:
    text: str = response["output"][0]["content"][0]["text"]
    return text


def ended(url: str, name: str, within_s: float = 60.0) -> dict[str, Any]:
    """Return a background response once it is not in progress."""
    found: list[dict[str, Any]] = []

    def over() -> bool:
        found[:] = [httpx.get(f"{url}{RESPONSES}/{name}", timeout=10).json()]
        return bool(found[0]["status"] != "in_progress")

    wait_for(over, within_s)
    return found[0]


def free_pair() -> int:
    """Return a port that was free a moment ago, as was the next one; the kernel gives neither to anyone who asks for
    any port."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError):
            for number in (port, port + 1):
                socket.create_server(("127.0.0.1", number)).close()
            return port


class Gateway:
    """A TCP proxy to the first router that accepts connections."""

    def __init__(self, *urls: str) -> None:
        self._ports = [int(url.rpartition(":")[2]) for url in urls]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            for port in self._ports:
                with contextlib.suppress(OSError):
                    server = socket.create_connection(("127.0.0.1", port))
                    for pair in ((client, server), (server, client)):
                        threading.Thread(target=_carry, args=pair, daemon=True).start()
                    break
            else:
                client.close()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
