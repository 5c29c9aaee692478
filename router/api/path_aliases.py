"""Maps API paths without `/v1` to those with it, for clients whose base URL lacks it."""

from __future__ import annotations

_BARE = (
    "/audio/transcriptions", "/audio/translations", "/batches", "/chat/completions", "/completions", "/embeddings",
    "/files", "/messages", "/models", "/responses",
)  # fmt: skip
"""Paths of OpenAI's and Anthropic's APIs below `/v1`; `/score` and others exist as they are."""
_BEGINS = tuple(f"{path}/" for path in _BARE)


def canonical(path: str) -> str:
    """Return the path of the route that serves this path."""
    return f"/v1{path}" if path in _BARE or path.startswith(_BEGINS) else path
