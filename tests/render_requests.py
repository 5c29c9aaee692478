"""Chats with data URLs as clients write them, and the requests that a router makes of them for a node."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from kvferry.protocol.media import RenderRequest


def render_request(messages: Sequence[dict[str, Any]], template: str = "", **given: Any) -> RenderRequest:
    """given: variables of the chat template."""
    files: list[bytes] = []
    shown = [{**message, "content": _content(message.get("content"), files)} for message in messages]
    return RenderRequest(json.dumps({"messages": shown, **given}).encode(), template=template, files=tuple(files))


def _content(content: Any, files: list[bytes]) -> Any:
    """The content without its media's data, which go to `files`."""
    return [_part(part, files) for part in content] if isinstance(content, list) else content


def _part(part: dict[str, Any], files: list[bytes]) -> dict[str, Any]:
    if (kind := part["type"]) == "text":
        return part
    head, comma, data = part[kind]["url"].partition(",")
    files.append(base64.b64decode(data))
    return {"type": kind, kind: {"url": head + comma}}
