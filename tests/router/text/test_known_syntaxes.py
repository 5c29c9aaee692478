"""Syntaxes of templates that show tools and never a call: they are chosen by the template, read and bound."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvferry.router.text.parsers.derived.grammar import calls
from kvferry.router.text.parsers.derived.reader import SyntaxParser
from kvferry.router.text.parsers.derived.syntax import NAME
from kvferry.router.text.parsers.derived.writing import written
from kvferry.router.text.parsers.known_syntaxes import HERMES, known_syntax
from kvferry.router.text.parsers.output_parser import merged
from kvferry.router.text.parsers.syntax import Tool, grammar
from kvferry.router.text.template import ChatTemplate
from kvferry.structured_output import lark
from tests.api_parts import EOS, demo_text

SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "boolean"}},
    "required": ["place"],
}
SCHEMAS: dict[str, dict[str, Any]] = {"get": SCHEMA, "now": {"type": "object", "properties": {}}}
SHOWS = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "LFM2": "{% if tools %}<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}" + SHOWS,
    "LFM2.5": "{% if tools %}List of tools: [{{ tools | map('tojson') | join(', ') }}]{% endif %}" + SHOWS,
    "Granite 3": "{% if tools %}Respond only with <|tool_call|> followed by a JSON list of tools used."
    "{{ tools | tojson }}{% endif %}" + SHOWS,
}
SMOL = "{% if xml_tools %}{% for t in xml_tools[:] %}<tool_call>{{ t.function.name }}{% endfor %}{% endif %}" + SHOWS
"""Like SmolLM3's: tools have a variable of their own."""
TEXTS = {
    "LFM2": "<|tool_call_start|>[get(place='São \\'X\\'', days=-3, deep=True), now()]<|tool_call_end|>",
    "LFM2.5": "<|tool_call_start|>[get(place='São \\'X\\'', days=-3, deep=True), now()]<|tool_call_end|>",
    "Granite 3": '<|tool_call|>[{"name": "get", "arguments": {"place": "São \'X\'", "days": -3, "deep": true}}, '
    '{"name": "now", "arguments": {}}]',
}
CALLS = [("get", {"place": "São 'X'", "days": -3, "deep": True}), ("now", {})]


def read(model: str, parts: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    syntax = known_syntax(TEMPLATES[model])
    assert syntax is not None
    parser = SyntaxParser(syntax, SCHEMAS)
    found = [*map(parser.feed, parts), parser.finish()]
    made = merged([delta for each in found for delta in each.calls])
    return "".join(each.text for each in found), [(call.name, json.loads(call.arguments)) for call in made]


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_template_s_own_prompt_is_shown_and_its_syntax_is_known(model: str) -> None:
    text = replace(demo_text(), template=ChatTemplate(TEMPLATES[model], {}))
    dialect = text.dialect
    assert dialect is not None
    assert (dialect.own, dialect.syntax) == (True, known_syntax(TEMPLATES[model]))
    tools = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]
    assert "You may call" not in text.render([{"role": "user", "content": "Hi"}], tools=tools)


def asked(call_args: str, content: str | None = None) -> list[dict[str, Any]]:
    functions = [{"name": "get", "arguments": call_args}, {"name": "now", "arguments": "{}"}]
    calls = [{"id": f"c{place}", "type": "function", "function": each} for place, each in enumerate(functions)]
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "sunny"},
    ]


@pytest.mark.parametrize("model", [*TEMPLATES, "SmolLM3"])
def test_calls_that_the_template_drops_are_in_the_content_of_their_message(model: str) -> None:
    """They are written as the model writes them, so that they are read back as those calls."""
    source = TEMPLATES.get(model) or SMOL
    text = replace(demo_text(), template=ChatTemplate(source, {}))
    messages = asked(json.dumps(CALLS[0][1]), "I look.")
    found = text.rendering(messages)
    prompt = text.render(messages)
    assert found.adaptations == ("calls-in-content",)
    written = prompt.removeprefix("HiI look.\n").removesuffix("sunny")
    dialect = text.dialect
    assert dialect is not None
    assert dialect.parser is not None
    parser = dialect.parser(SCHEMAS)
    made = merged([*parser.feed(written).calls, *parser.finish().calls])
    assert [(call.name, json.loads(call.arguments)) for call in made] == CALLS
    strict = replace(text, strict_templates=True)
    assert strict.render(messages) == "HiI look.sunny"


@pytest.mark.parametrize("shown", ["m.tool_calls | tojson", "m.tool_calls[0].function.name"])
def test_a_template_that_shows_calls_gets_no_second_ones(shown: str) -> None:
    source = SMOL.replace("{{ m.content }}", f"{{{{ m.content }}}}{{{{ {shown} if m.tool_calls }}}}")
    text = replace(demo_text(), template=ChatTemplate(source, {}))
    assert text.rendering(asked("{}")).adaptations == ()


def test_tools_are_in_the_variable_that_the_template_reads() -> None:
    """SmolLM3's own template looks for them in `xml_tools`, which clients could only set by chat_template_kwargs."""
    text = replace(demo_text(), template=ChatTemplate(SMOL, {}))
    tools = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]
    messages = [{"role": "user", "content": "Hi"}]
    assert text.render(messages, tools=tools).startswith("<tool_call>get")
    assert text.render(messages, extra={"xml_tools": tools}) == text.render(messages, tools=tools)
    assert text.render(messages) == "Hi"


@pytest.mark.parametrize("model", TEMPLATES)
def test_calls_are_read_whole_and_cut_everywhere(model: str) -> None:
    said = TEXTS[model]
    assert read(model, [said]) == ("", CALLS)
    assert read(model, list(said)) == ("", CALLS)
    for at in range(1, len(said)):
        assert read(model, [said[:at], said[at:]]) == ("", CALLS)
    assert read(model, ["An answer [1] in words."]) == ("An answer [1] in words.", [])


@pytest.mark.parametrize(
    "asked", ["[func_name1(params_name1=params_value1, params_name2=params_value2...)]", "[func_name1(param1=value1)]"]
)
def test_a_template_that_asks_for_pythonic_calls_keeps_its_own_prompt(asked: str) -> None:
    """Those of Llama 3.2, Llama 4 and ToolACE write earlier calls without quotes, so that they cannot be read back."""
    source = f"{{% if tools %}}Use {asked}: {{{{ tools | tojson }}}}{{% endif %}}" + SHOWS.replace(
        "{{ m.content }}",
        "{{ m.content }}{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}("
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{{ ', ' if not loop.last }}{% endfor %})"
        "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}",
    )
    text = replace(demo_text(), template=ChatTemplate(source, {}))
    dialect = text.dialect
    assert dialect is not None
    assert (dialect.family, dialect.own) == ("pythonic", True)
    tools = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]
    assert text.render([{"role": "user", "content": "Hi"}], tools=tools).startswith(f"Use {asked}: [")


@cache
def grammar_tokenizer() -> LLTokenizer:
    return LLTokenizer(demo_text().tokenizer.library.to_str(), eos_token=[EOS])


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_grammar_binds_calls_in_the_syntax(model: str) -> None:
    library = demo_text().tokenizer.library
    tools = [Tool(name, schema) for name, schema in SCHEMAS.items()]
    syntax = known_syntax(TEMPLATES[model])
    assert syntax is not None
    source = grammar(partial(calls, syntax), tools, partial(lark.spelled, {}), forced=True, parallel=True)
    for text, right in ((TEXTS[model].replace("\\'X\\'", "X").replace("'X'", "X"), True), ("Hello", False)):
        matcher = LLMatcher(grammar_tokenizer(), LLMatcher.grammar_from_lark(source))
        ids = library.encode(text, add_special_tokens=False).ids
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == right


def test_other_templates_have_none() -> None:
    assert known_syntax(SHOWS) is None


def test_a_written_call_keeps_what_its_arguments_say() -> None:
    """Also the character that stands for the name in a syntax."""
    text = written(HERMES, [{"function": {"name": "get", "arguments": {"place": f"a{NAME}b"}}}])
    assert f"a{NAME}b" in text
    assert '"get"' in text
