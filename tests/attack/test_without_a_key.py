"""Attacker: a client without a key, and one with a wrong key.

At most it reads the open paths: two pages without data, the probes, and metrics without tenants."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

import pytest

from kvferry.protocol.version import VERSION
from tests.attack.attacked import TENANTS, Attacked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PUBLIC = {"/", "/health", "/ready", "/metrics", "/dashboard"}
"""As docs/reference/http-api.md says. Whoever adds one here says so there."""
ROUNDABOUT = (
    "//v1/models", "/v1//models", "/v1/models/", "/./v1/models", "/health/../v1/models", "/health/%2e%2e/v1/models",
    "/%761/models", "/V1/MODELS", "/v1/models;/health", "/v1/models?/health", "/v1/models%23/health", "/health/",
    "/metrics/../targets", "/dashboard/../dashboard/state", "/dashboard/", "/dashboard/state/", "\\v1\\models",
    "/docs", "/openapi.json", "/redoc", "/docs/oauth2-redirect", "*", "http://127.0.0.1/v1/models",
)  # fmt: skip
"""Ways around a check of paths."""
SOFTWARE = ("uvicorn", "fastapi", "starlette", "python/", "uvloop", "valkey", "torch", "hypercorn")


def routes(attacked: Attacked) -> list[tuple[str, str]]:
    described = attacked.ask("GET", "/openapi.json")
    assert described.status_code == 200
    paths = described.json()["paths"]
    return [(method.upper(), re.sub(r"{\w+}", "x" * 20, path)) for path, ways in paths.items() for method in ways]


def test_every_route_but_the_open_ones_needs_a_key(attacked: Attacked) -> None:
    """At most: 401 in OpenAI's error shape, whatever the body is."""
    found = routes(attacked)
    assert {path for _, path in found} >= PUBLIC
    assert len(found) > 30
    for method, path in found:
        for headers in ({}, {"authorization": "Bearer kvf-wrong"}, {"x-api-key": TENANTS[0]}, {"authorization": "x"}):
            answer = attacked.ask(method, path, None, headers=headers, json={} if method == "POST" else None)
            assert answer.status_code == (200 if path in PUBLIC else 401), (method, path, answer.status_code)
            if path not in PUBLIC:
                assert answer.json()["error"]["type"], answer.text
            tells_nothing(attacked, path, answer.text + str(answer.headers))


def test_no_other_spelling_of_a_path_opens_a_route(attacked: Attacked) -> None:
    """At most: 401, 404, or the open path itself."""
    for target in ROUNDABOUT:
        for method in ("GET", "HEAD", "OPTIONS", "get"):
            head = raw(attacked, f"{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            status = int(head.split()[1])
            shown = (200,) if target.rstrip("/") in PUBLIC else ()
            assert status in (400, 401, 404, 405, *shown), (method, target, head)
            tells_nothing(attacked, target, head)


def test_an_upgrade_or_a_smuggled_request_opens_no_route(attacked: Attacked) -> None:
    """At most: the first answer; what follows a body of unclear length is not read as a request."""
    inner = "GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    for framing in (
        "upgrade: websocket\r\nconnection: upgrade\r\n",
        "upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABk\r\n",
        f"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{inner}",
        f"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n{inner}",
        f"content-length: 5\r\ncontent-length: 6\r\n\r\nabcde{inner}",
    ):
        answer = raw(attacked, f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{framing}\r\n")
        assert int(answer.split()[1]) in (400, 401), answer
        assert '"data"' not in answer


def tells_nothing(attacked: Attacked, where: str, text: str) -> None:
    """Neither tenants, nor paths, nor the software that it is made of."""
    low = text.lower()
    for word in (*TENANTS, *attacked.secrets, str(attacked.home), "smollm2_", ".gguf", "/root", *SOFTWARE):
        if word in SOFTWARE and where in ("/", "/dashboard", "/metrics"):
            continue
        assert word.lower() not in low, (where, word)
    if where not in PUBLIC:
        assert VERSION not in text, where


def raw(attacked: Attacked, request: str) -> str:
    """What comes back until the connection ends, or for two seconds."""
    place = urlsplit(attacked.cluster.url)
    with socket.create_connection((place.hostname, place.port), timeout=2) as sock:
        sock.sendall(request.encode())
        got = b""
        try:
            while piece := sock.recv(1 << 16):
                got += piece
                if b"\r\n\r\n" in got and b"connection: close" not in request.encode():
                    sock.settimeout(0.3)
        except TimeoutError:
            pass
        except ConnectionError:
            pass
    return got.decode(errors="replace")
