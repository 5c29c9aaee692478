"""A relay between an agent and a server that adds fields to the agent's requests, so that a small model's part is short
and the same each time: agents set neither the temperature nor a choice of tools."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEPT = ("authorization", "x-api-key", "content-type", "accept", "anthropic-version", "anthropic-beta", "user-agent")
RESULTS = ('"function_call_output"', '"custom_tool_call_output"', '"tool_result"')
"""What a body with a tool's result holds."""


@contextlib.contextmanager
def relay(url: str, first: dict[str, Any], later: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Serve the relay; yields its base URL and the statuses of the server's answers.

    Bodies without a tool's result get the fields of `first`, others those of `later`."""
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            more = later if any(mark in body for mark in RESULTS) else first
            headers = {name: value for name, value in self.headers.items() if name.lower() in KEPT}
            data = json.dumps({**json.loads(body), **more}).encode()
            request = urllib.request.Request(url + self.path, data, headers)
            try:
                answer = urllib.request.urlopen(request, timeout=60)
            except urllib.error.HTTPError as error:
                answer = error
            statuses.append(answer.status)
            self.send_response(answer.status)
            self.send_header("content-type", answer.headers["content-type"])
            self.end_headers()
            with contextlib.suppress(OSError):
                while part := answer.read1(65536):
                    self.wfile.write(part)
                    self.wfile.flush()

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", statuses
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
