"""Builds the response with the chat page: its scripts and styles joined into one HTML file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse, Response

from kvferry.router.page.policy import headers

_FOLDER = Path(__file__).parent
STYLES = ("layout.css", "turns.css")
"""Files of the page's style, in their order."""
SCRIPTS = (
    "elements.js",
    "markdown_inline.js",
    "markdown_blocks.js",
    "markdown_view.js",
    "conversation.js",
    "store.js",
    "settings.js",
    "stream.js",
    "images.js",
    "dictation.js",
    "turn_view.js",
    "sidebar.js",
    "scrolling.js",
    "chat.js",
    "page.js",
)
"""Files of the page's script; while it loads, a file may use only what earlier files define."""
NO_MARKUP = ("require-trusted-types-for 'script'", "trusted-types 'none'")
"""Directives under which a browser does not let scripts turn text into HTML or code."""


@cache
def _page() -> str:
    page = (_FOLDER / "chat.html").read_text(encoding="utf-8")
    for folder, names in (("style", STYLES), ("script", SCRIPTS)):
        parts = [(_FOLDER / f"{folder}s" / name).read_text(encoding="utf-8") for name in names]
        page = page.replace(f"{{{{ {folder} }}}}", "\n".join(parts))
    return page


def chat_page() -> Response:
    """Return the chat page."""
    return HTMLResponse(_page(), headers=headers(_page(), *NO_MARKUP))
