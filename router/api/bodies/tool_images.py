"""Replaces images in tool results by a note; the Messages and Responses APIs move them to the next user message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IMAGE_NOTE = "(image: see the next message)"
"""Text that replaces an image in a tool's result."""

Part = Mapping[str, Any]
"""Content part of a chat: a text, an image or audio."""


def result_text(parts: Sequence[Part]) -> str:
    """Return the text of a tool's result."""
    return "\n".join(IMAGE_NOTE if is_image(part) else part["text"] for part in parts)


def is_image(part: Part) -> bool:
    """Return whether a content part is an image."""
    return bool(part["type"] == "image_url")


def plain(parts: Sequence[Part]) -> str | list[Part]:
    """Return the content of a message: one text, or the parts if one of them is an image or audio."""
    if any(part["type"] != "text" for part in parts):
        return list(parts)
    return "\n".join(part["text"] for part in parts)
