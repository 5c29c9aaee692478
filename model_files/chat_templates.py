"""Reads chat templates and special tokens from a model's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.source import ModelSource, read_json
from kvferry.model_files.tekken import BEGIN, END, tekken_template
from kvferry.protocol.errors import ConfigError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """Sources of a model's templates, for chats without and with tools. special_tokens: variables of both."""

    special_tokens: Mapping[str, str]
    chat: str | None = None
    tool_use: str | None = None


def read_chat_templates(source: ModelSource) -> ChatTemplates:
    """Return the templates in a model's files. Raises ConfigError."""
    return _from_gguf(source) if source.kind == "gguf" else _from_directory(source.path)


def read_template_file(path: Path) -> str:
    """Return a template file's source: Jinja, or JSON with the source under `chat_template`. Raises ConfigError."""
    if path.suffix == ".json":
        value = read_json(path).get("chat_template")
        if not isinstance(value, str):
            raise ConfigError(f"{path} holds no chat_template", param="chat_template")
        return value
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {path}: {error}", param="chat_template") from error


def _from_gguf(source: ModelSource) -> ChatTemplates:
    metadata = read_gguf(source.path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
    special_tokens = {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}
    templates = [metadata.get(f"tokenizer.chat_template{suffix}") for suffix in ("", ".tool_use")]
    if odd := [value for value in templates if value is not None and not isinstance(value, str)]:
        raise ConfigError(f"a chat template of the GGUF file must be text, not {odd[0]!r:.80}", param="chat_template")
    return ChatTemplates(special_tokens, *templates)


def _from_directory(path: Path) -> ChatTemplates:
    config, legacy = (_optional_json(path / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    found = {name: _content(config.get(name, legacy.get(name))) for name in _SPECIAL}
    special_tokens = {name: token for name, token in found.items() if token is not None}
    chat, tool_use = _sources(path, config)
    if chat is None and not (path / "tokenizer.json").is_file() and (chat := tekken_template(path)) is not None:
        special_tokens = {"bos_token": BEGIN, "eos_token": END, **special_tokens}
    return ChatTemplates(special_tokens, chat, tool_use)


def _sources(path: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Read chat_template.jinja, else chat_template.json, else tokenizer_config.json (one or named ones)."""
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        return read_template_file(own_file), None
    value = _optional_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        return named.get("default"), named.get("tool_use")
    return value if isinstance(value, str) else None, None


def _content(token: Any) -> str | None:
    """Return a special token of tokenizer_config.json, which is text or an object with its content."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
