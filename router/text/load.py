"""Loader of a model's text side: tokenizer, chat templates, special tokens and facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.model_name import ModelName, naming, require_distinct, split_names
from kvferry.model_files.pooling_config import read_task
from kvferry.model_files.source import ModelSource, read_facts, read_json, resolve
from kvferry.model_files.tokenizer import load_tokenizer
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import RouterSettings
from kvferry.router.text.parsers.families import check_channels, check_names
from kvferry.router.text.template import ChatTemplate
from kvferry.router.text.text_model import TextModel

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class _Templates:
    chat: str | None = None
    tool_use: str | None = None


def load_text_models(settings: RouterSettings) -> list[TextModel]:
    """Load every model of `settings.model`, in order; raise ConfigError."""
    served = split_names(settings.served_model_name, len(settings.model))
    if settings.chat_template and len(settings.model) > 1:
        raise ConfigError(
            "--chat-template needs a single model; with several, put each model's template into its directory "
            "(chat_template.jinja)",
            param="chat_template",
        )
    models = [_load(settings, model, names) for model, names in zip(settings.model, served, strict=True)]
    require_distinct([text.called for text in models])
    return models


def load_text_model(settings: RouterSettings) -> TextModel:
    """Load the only model of `settings.model`; raise ConfigError."""
    (text,) = load_text_models(settings)
    return text


def _load(settings: RouterSettings, model: str, served: tuple[str, ...]) -> TextModel:
    """Load a model's files without its weights."""
    source = resolve(model, weights=False)
    with naming(source.name):
        return _read(settings, source, served)


def _read(settings: RouterSettings, source: ModelSource, served: tuple[str, ...]) -> TextModel:
    special_tokens, templates = (_from_gguf if source.kind == "gguf" else _from_directory)(source)
    if settings.chat_template:
        templates = _Templates(_read_text(Path(settings.chat_template).expanduser()))
    template = None
    if templates.chat is not None:
        template = ChatTemplate(templates.chat, special_tokens, tool_use=templates.tool_use)
    facts = read_facts(source)
    if settings.generation_config == "none":
        facts = replace(facts, sampling=())
    knows_tools = template is not None and template.knows_tools
    check_names(settings.tool_call_parser, settings.reasoning_parser, knows_tools=knows_tools)
    text = TextModel(
        ModelName(source.name, served),
        load_tokenizer(source),
        template,
        facts,
        read_task(source, settings.pooling),
        settings.tool_call_parser,
        settings.reasoning_parser,
        settings.strict_templates,
    )
    check_channels(text.tokenizer, text.dialect, text.thinking)
    return text


def _from_gguf(source: ModelSource) -> tuple[dict[str, str], _Templates]:
    metadata = read_gguf(source.path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
    special_tokens = {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}
    templates = [metadata.get(f"tokenizer.chat_template{suffix}") for suffix in ("", ".tool_use")]
    if odd := [value for value in templates if value is not None and not isinstance(value, str)]:
        raise ConfigError(f"a chat template of the GGUF file is no text but {odd[0]!r:.80}", param="chat_template")
    return special_tokens, _Templates(*templates)


def _from_directory(source: ModelSource) -> tuple[dict[str, str], _Templates]:
    config = _optional_json(source.path / "tokenizer_config.json")
    legacy = _optional_json(source.path / "special_tokens_map.json")
    found = {name: _content(config.get(name, legacy.get(name))) for name in _SPECIAL}
    special_tokens = {name: token for name, token in found.items() if token is not None}
    return special_tokens, _directory_templates(source.path, config)


def _directory_templates(path: Path, config: Mapping[str, Any]) -> _Templates:
    """Read chat_template.jinja, else chat_template.json, else tokenizer_config.json (one or named ones)."""
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        return _Templates(_read_text(own_file))
    value = _optional_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        return _Templates(named.get("default"), named.get("tool_use"))
    return _Templates(value if isinstance(value, str) else None)


def _content(token: Any) -> str | None:
    """Return a special token of tokenizer_config.json, which is text or an object with its content."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    """Read a template file: Jinja source, or JSON with the source under `chat_template`."""
    if path.suffix == ".json":
        value = read_json(path).get("chat_template")
        if not isinstance(value, str):
            raise ConfigError(f"{path} holds no chat_template", param="chat_template")
        return value
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {path}: {error}", param="chat_template") from error
