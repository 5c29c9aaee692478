"""Security headers of the HTML pages: no external resources, one script, requests to this server only."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache


@cache
def headers(page: str, *more: str) -> dict[str, str]:
    """Return the security headers of a page, with the hashes of its one script and style, and more directives."""
    policy = "; ".join((
        "default-src 'none'",
        f"script-src '{_hash(page, 'script')}'",
        f"style-src '{_hash(page, 'style')}'",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        *more,
    ))  # fmt: skip
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def _hash(page: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
