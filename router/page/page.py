"""The chat page: one file, with a policy that lets it load nothing from anywhere and talk to this server only."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse, Response

_FILE = Path(__file__).with_name("chat.html")


@cache
def _page() -> tuple[str, str]:
    """The page and its Content-Security-Policy, which names its script and its style by their hashes."""
    page = _FILE.read_text(encoding="utf-8")
    policy = "; ".join((
        "default-src 'none'",
        f"script-src '{_hash(page, 'script')}'",
        f"style-src '{_hash(page, 'style')}'",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ))  # fmt: skip
    return page, policy


def _hash(page: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def chat_page() -> Response:
    page, policy = _page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(page, headers=headers)
