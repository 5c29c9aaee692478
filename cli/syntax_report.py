"""Describes for `kvferry doctor` how each model writes tool calls and reasoning, as its chat template shows."""

from __future__ import annotations

from kvferry.protocol.settings import ServeSettings
from kvferry.router.text.loader import load_text_models
from kvferry.router.text.parsers.derived.syntax import in_one_line
from kvferry.router.text.text_model import TextModel


def reported(settings: ServeSettings) -> tuple[str, bool]:
    """Describe how each model's tool calls are prompted and parsed, and its reasoning marks.

    Also return whether all calls that the chat templates show can be parsed. Raises ConfigError."""
    texts = load_text_models(settings)
    reports = [f"{_calls(text)}; {_reasoning(text)}" for text in texts]
    if len(texts) > 1:
        reports = [f"{text.name}: {each}" for text, each in zip(texts, reports, strict=True)]
    return "; ".join(reports), not any(map(_falls_back, texts))


def _falls_back(text: TextModel) -> bool:
    """Return whether the template shows tools or calls, but in a syntax that cannot be parsed."""
    template, dialect = text.template, text.dialect
    return template is not None and template.knows_tools and dialect is not None and not dialect.own


def _calls(text: TextModel) -> str:
    template, dialect = text.template, text.dialect
    if template is None:
        return "no chat template"
    if dialect is None:
        return "calls no tools"
    if dialect.syntax is not None:
        shown = "" if dialect.own else "; it shows no tools, so the prompt describes them"
        return f"calls as the chat template writes them: {dialect.syntax.describe()}{shown}"
    if dialect.own:
        return f"calls of the family {dialect.family}"
    why = "shows no calls that can be read" if template.knows_tools else "knows no tools"
    return f"the chat template {why}, so the prompt describes tools in Hermes' syntax"


def _reasoning(text: TextModel) -> str:
    thinking = text.thinking
    if thinking is None:
        return "no reasoning"
    return f"reasoning {in_one_line(thinking.begins[0])} … {in_one_line(thinking.ends[0])}"
