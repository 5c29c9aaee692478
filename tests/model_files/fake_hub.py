"""A hub over HTTP with the files of one small model, which can break off in the middle of one."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections import Counter
from pathlib import Path

COMMIT = "c" * 40


class FakeHub:
    """Serves `files` as the repository org/tiny; org/gated is gated and everything else is not there. The first `cuts`
    answers for the largest file end after half of what was asked for; as on the real one, its SHA-256 is known. `asked`
    counts requests by path; `sent` are the bytes of file contents that went out."""

    def __init__(self, files: dict[str, bytes], cuts: int = 0) -> None:
        self.files, self.cuts = files, cuts
        self.largest = max(files, key=lambda name: len(files[name]))
        self.sha256 = hashlib.sha256(files[self.largest]).hexdigest()
        self.asked: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables with which huggingface_hub asks this hub, and waits little between tries."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FakeHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.owner.asked[path] += 1
        if "org/gated" in path:
            self._refuse(403, "GatedRepo", "Access to model org/gated is restricted.")
        elif path.startswith("/api/models/org/tiny"):
            self._json(path, body)
        elif path.startswith("/org/tiny/resolve/") and path.rpartition("/")[2] in self.owner.files:
            self._file(path.rpartition("/")[2], body)
        else:
            self._refuse(404, "RepoNotFound", "Repository not found")

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, path: str, body: bool) -> None:
        files = self.owner.files
        if "/tree/" in path:
            listed = {name: {"size": len(data), "oid": _etag(data)} for name, data in files.items()}
            large = {**listed[self.owner.largest], "oid": self.owner.sha256, "pointerSize": 130}
            listed[self.owner.largest]["lfs"] = large
            found: object = [{"type": "file", "path": name, **about} for name, about in listed.items()]
        else:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            found = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
        text = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if body:
            self.wfile.write(text)

    def _file(self, name: str, body: bool) -> None:
        data = self.owner.files[name]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        rest = data[start:]
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(rest)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        if name == self.owner.largest and self.owner.cuts:
            self.owner.cuts -= 1
            rest, self.close_connection = rest[: len(rest) // 2], True
        self.wfile.write(rest)
        self.owner.sent[name] += len(rest)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
