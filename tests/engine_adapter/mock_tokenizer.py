"""vLLM's /tokenize and /detokenize with the demo model's tokenizer, and what its bad_words ban."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import FastAPI, Request

from kvferry.model_files.source import DEMO_MODEL, resolve
from kvferry.model_files.tokenizer import TextTokenizer, load_tokenizer


@cache
def tokenizer() -> TextTokenizer:
    return load_tokenizer(resolve(DEMO_MODEL, weights=False))


def encoded(text: str) -> list[int]:
    return list(tokenizer().library.encode(text, add_special_tokens=False).ids)


def mount_tokenizer(app: FastAPI) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await request.json()
        assert body["add_special_tokens"] is False
        return {"tokens": encoded(body["prompt"])}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        return {"prompt": tokenizer().decode((await request.json())["tokens"])}


def banned(words: list[str], own: list[int]) -> set[int]:
    """Tokens that vLLM would not draw behind an output."""
    found: set[int] = set()
    for word in words:
        bare, spaced = encoded(word.lstrip()), encoded(" " + word.lstrip())
        forms = [bare, *([spaced] if spaced[0] != bare[0] and len(spaced) == len(bare) else [])]
        found |= {form[-1] for form in forms if len(form) == 1 or own[1 - len(form) :] == form[:-1]}
    return found
