"""Small vocabularies, and characters that tokenizers find hard."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvferry.model_files.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN

UNSAYABLE = "\x04\x06\x13\x14\x16\x1d"
"""The demo model's vocabulary lacks these, and the bytes 0xF1 and 0xF2 of the planes 4 to 11: it drops them."""
CHARS = st.characters(exclude_categories=["Cs"], max_codepoint=0x3FFFF, exclude_characters=UNSAYABLE)


def sentencepiece() -> dict[str, Any]:
    words = ["▁", "a", "b", "c", "▁a", "ab", "bc", "▁ab", "abc", "▁abc", "cc", "aa"]
    control = ["<unk>", "<s>", "</s>"]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*control, *raw, *words],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(place) for place in (90, 91, 92, 93, 3, 2, 1, 5, 4, 6, 8, 7)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
