"""tekken.json, of repositories of Mistral without a tokenizer.json: tiktoken's tokens, and a prompt of version 7."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.media.chat import ChatRenderer
from kvferry.model_files.chat_templates import read_chat_templates
from kvferry.model_files.source import ModelSource, weight_files
from kvferry.model_files.tekken import TEKKEN
from kvferry.model_files.tokenizer import load_tokenizer
from kvferry.protocol.errors import ConfigError

SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AUDIO]", "[BEGIN_AUDIO]",
    "[IMG]",
)  # fmt: skip
WORDS = (b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world", b"\xc3\xa9")
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
FILLED = 4
"""Ids of special tokens that the file does not name."""


def tekken(**change: Any) -> dict[str, Any]:
    tokens = [*(bytes((byte,)) for byte in range(256)), *WORDS, b"beyond"]
    count = len(SPECIAL) + FILLED
    config = {"pattern": PATTERN, "default_vocab_size": count + 256 + len(WORDS), "default_num_special_tokens": count}
    return {
        "config": config | {"version": "v7"},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(each).decode()} for rank, each in enumerate(tokens)],
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)],
        **change,
    }


def source(path: Path, **change: Any) -> ModelSource:
    (path / TEKKEN).write_text(json.dumps(tekken(**change)))
    return ModelSource("hf", path, "tiny", "")


def merged(text: bytes) -> list[int]:
    """tiktoken's algorithm: the neighbours whose union has the lowest rank become one."""
    ranks = {bytes((byte,)): byte for byte in range(256)} | {word: 256 + n for n, word in enumerate(WORDS)}
    parts = [bytes((byte,)) for byte in text]
    while True:
        found = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return [len(SPECIAL) + FILLED + ranks[part] for part in parts]
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("word", ["hello", " world", "hellhe", "llo", "é", " worldly", "héllo"])
def test_words_are_merged_as_tiktoken_does(tmp_path: Path, word: str) -> None:
    found = load_tokenizer(source(tmp_path))
    assert found.library.encode(word, add_special_tokens=False).ids == merged(word.encode())
    assert found.decode(merged(word.encode())) == word
    assert b"".join(map(found.token_bytes, merged(word.encode()))) == word.encode()


def test_special_tokens_come_first_and_are_filled(tmp_path: Path) -> None:
    found = load_tokenizer(source(tmp_path))
    assert found.library.encode("[INST]hello[/INST]").ids == [1, 3, *merged(b"hello"), 4]
    assert found.token(len(SPECIAL)) == f"<SPECIAL_{len(SPECIAL)}>"
    assert found.special_ids == {*range(len(SPECIAL) + FILLED)}
    assert found.vocab_size == len(SPECIAL) + FILLED + 256 + len(WORDS)


def test_a_chat_has_the_prompt_of_version_7(tmp_path: Path) -> None:
    templates = read_chat_templates(source(tmp_path))
    part = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [part, {"type": "text", "text": "Who speaks?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Again?"},
    ]
    chat = json.dumps({"messages": messages, "add_generation_prompt": True}).encode()
    rendered = ChatRenderer(templates, "[AUDIO]").render(chat)
    assert "[AUDIO]".join(rendered.texts) == (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST][BEGIN_AUDIO][AUDIO]Who speaks?[/INST]A cat.</s>"
        "[INST]Again?[/INST]"
    )


def test_texts_and_messages_of_users_in_a_row_are_joined_as_by_mistral_common(tmp_path: Path) -> None:
    """The expected texts are those of mistral-common's version 7."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": parts},
        {"role": "user", "content": parts},
        {"role": "user", "content": "c "},
        {"role": "assistant", "content": " d "},
        {"role": "user", "content": "e"},
    ]
    rendered = ChatRenderer(read_chat_templates(source(tmp_path)), "[AUDIO]").render(
        json.dumps({"messages": messages, "add_generation_prompt": True}).encode()
    )
    assert rendered.texts == ("<s>[SYSTEM_PROMPT]a\n\nb[/SYSTEM_PROMPT][INST]a\n\nb\n\nc [/INST] d</s>[INST]e[/INST]",)


def test_other_files_come_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("mine")
    assert read_chat_templates(source(tmp_path)).chat == "mine"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"special_tokens": None}, "version 3 or earlier"),
        ({"config": {}}, "cannot read the tokenizer"),
        ({"vocab": [{"rank": 0}]}, "cannot read the tokenizer"),
        ({"vocab": 5}, "cannot read the tokenizer"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    given = source(tmp_path, **change)
    with pytest.raises(ConfigError, match=why):
        load_tokenizer(given)
    read_chat_templates(given)


def test_copies_of_the_weights_under_other_names_are_left_out(tmp_path: Path) -> None:
    for name in ("consolidated.safetensors", "model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).touch()
    assert [file.name for file in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
