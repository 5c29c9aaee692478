"""Response with the chat page, a single HTML file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse, Response

from kvferry.router.page.policy import headers

_FILE = Path(__file__).with_name("chat.html")


@cache
def _page() -> str:
    return _FILE.read_text(encoding="utf-8")


def chat_page() -> Response:
    """Return the chat page."""
    return HTMLResponse(_page(), headers=headers(_page()))
