"""Loads the TextModel of each served model: tokenizer, chat templates, special tokens and configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvferry.model_files.chat_templates import read_chat_templates, read_template_file
from kvferry.model_files.model_name import ModelName, require_distinct, split_names
from kvferry.model_files.pooling_config import read_task
from kvferry.model_files.read_errors import naming
from kvferry.model_files.source import ModelSource, read_facts, resolve
from kvferry.model_files.tokenizer import load_tokenizer
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import RouterSettings
from kvferry.router.text.parsers.families import check_channels, check_names
from kvferry.router.text.template import ChatTemplate
from kvferry.router.text.text_model import TextModel


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
    found = read_chat_templates(source)
    if settings.chat_template:
        given = read_template_file(Path(settings.chat_template).expanduser())
        found = replace(found, chat=given, tool_use=None)
    template = None
    if found.chat is not None:
        template = ChatTemplate(found.chat, found.special_tokens, tool_use=found.tool_use)
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
