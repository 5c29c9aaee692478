"""Object storage over HTTP, as S3 answers: a list, and files from any byte on, as long as they are the same version."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections import Counter
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

DATE = "2026-11-01T00:00:00.000Z"
BUCKET = "models"


class FakeStore:
    """Serves `files` as the bucket `models`. The first `cuts` answers for the largest file end after half of it. `tags`
    are the versions that it tells, by name, where they are not the MD5. `sent` are the bytes of contents that went out.
    Anyone who has no key is refused."""

    def __init__(self, files: dict[str, bytes], cuts: int = 0) -> None:
        self.files, self.cuts = files, cuts
        self.tags: dict[str, str] = {}
        self.sent: Counter[str] = Counter()
        store = self

        class Handler(_Handler):
            owner = store

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def tag(self, name: str) -> str:
        return self.tags.get(name) or hashlib.md5(self.files[name], usedforsecurity=False).hexdigest()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        """As a Secret would bring them."""
        url = f"http://127.0.0.1:{self._server.server_port}"
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "here"}
        return {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", **keys}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FakeStore

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        bucket, _, name = unquote(asked.path).lstrip("/").partition("/")
        if bucket != BUCKET or "key/" not in self.headers.get("Authorization", ""):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif not name:
            self._answer(200, self._listed(parse_qs(asked.query).get("prefix", [""])[0]))
        elif name not in self.owner.files:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._file(name)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _listed(self, prefix: str) -> bytes:
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size><LastModified>{DATE}</LastModified>"
            f"<ETag>&quot;{self.owner.tag(name)}&quot;</ETag></Contents>"
            for name, data in sorted(self.owner.files.items())
            if name.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()

    def _file(self, name: str) -> None:
        owner, data = self.owner, self.owner.files[name]
        about = {"ETag": f'"{owner.tag(name)}"', "Last_Modified": "Sun, 01 Nov 2026 00:00:00 GMT"}
        wanted = self.headers.get("If-Match")
        if wanted and wanted.strip('"') != owner.tag(name):
            self._answer(412, b"", **about)
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        rest = data[start:]
        self.send_response(206)
        span = {"Content_Range": f"bytes {start}-{len(data) - 1}/{len(data)}", "Content_Length": str(len(rest))}
        for key, value in {**about, **span}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if owner.cuts and len(data) == max(map(len, owner.files.values())):
            owner.cuts -= 1
            rest, self.close_connection = rest[: len(rest) // 2], True
        self.wfile.write(rest)
        owner.sent[name] += len(rest)
