"""Wire format between a router and the child processes that render its chat templates, and the limits of a rendering.

A frame is its length in four bytes and its content. A request's content is marshalled, which only the child reads. An
answer's content is one byte for its kind and UTF-8 text: a router never decodes more than text from a child."""

from __future__ import annotations

import marshal
import os
import sys
from typing import Any, BinaryIO

MEMORY = 256 * 2**20
"""Memory that a child may take beyond its interpreter, in bytes of address space."""
DEADLINE_S = 5.0
"""Deadline of one rendering, in seconds of wall-clock time."""
MAX_GROWTH, MAX_ADDED = 4, 4 * 2**20
"""Longest rendered text: MAX_GROWTH times the size of its variables, plus MAX_ADDED bytes."""
MAX_ERROR_CHARS = 1000
"""Longest error message of a template, in characters."""
READY, TEXT, ERROR, MEMORY_SPENT, TOO_LONG = b"r", b"t", b"e", b"m", b"l"
"""Kinds of answers."""
COMMAND = (sys.executable, "-m", "kvferry.router.text.render_process")
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ")
LENGTH = 4
"""Bytes of a frame's length."""


def minimal_environment() -> dict[str, str]:
    """Return the environment variables of a child: what Python needs, and no secrets."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def longest_text(size: int) -> int:
    """Return the bound of a rendered text in bytes, for variables of `size` bytes."""
    return MAX_GROWTH * size + MAX_ADDED


def pack(value: Any) -> bytes:
    """Encode a request's content; raise ValueError for what JSON cannot hold."""
    return marshal.dumps(value, 2)


def unpack(content: bytes) -> Any:
    """Decode a request's content, which must come from this process's parent."""
    return marshal.loads(content)  # noqa: S302 - the router's own child reads what the router has written


def framed(content: bytes) -> bytes:
    """Return the content with its length."""
    return len(content).to_bytes(LENGTH, "big") + content


def answer(kind: bytes, text: str) -> bytes:
    """Return an answer's frame; an error's text is cut."""
    if kind == ERROR:
        text = text[:MAX_ERROR_CHARS]
    return framed(kind + text.encode("utf-8", "surrogatepass"))


def length_of(head: bytes) -> int:
    """Return the length of the content after a frame's first four bytes."""
    return int.from_bytes(head, "big")


def read_frame(source: BinaryIO) -> bytes | None:
    """Read a frame's content; None at the end of the input."""
    head = source.read(LENGTH)
    return source.read(length_of(head)) if len(head) == LENGTH else None


def parts_of(content: bytes) -> tuple[bytes, str]:
    """Return kind and text of an answer; raise ValueError for an invalid one."""
    return content[:1], content[1:].decode("utf-8", "surrogatepass")
