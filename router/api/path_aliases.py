"""Maps API paths without `/v1` to those with it, for clients whose base URL lacks it, and llama.cpp's other names."""

from __future__ import annotations

_BARE = (
    "/audio/transcriptions", "/audio/translations", "/batches", "/chat/completions", "/completions", "/embeddings",
    "/files", "/messages", "/models", "/responses",
)  # fmt: skip
"""Paths of OpenAI's and Anthropic's APIs below `/v1`; `/score` and others exist as they are."""
_NAMES = {"/v1/health": "/health", "/reranking": "/rerank", "/v1/reranking": "/v1/rerank"}
"""Routes by the further names that llama.cpp has for them."""
_BEGINS = tuple(f"{path}/" for path in _BARE)


def canonical(path: str) -> str:
    """Return the path of the route that serves this path."""
    return f"/v1{path}" if path in _BARE or path.startswith(_BEGINS) else _NAMES.get(path, path)
