"""Parser and grammar of one chat's output, combining reasoning, tool calls and the requested format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.work import Grammar
from kvferry.router.api.bodies.structured import RequestedGrammar
from kvferry.router.api.bodies.tools import ToolUse
from kvferry.router.text.parsers import harmony, harmony_syntax
from kvferry.router.text.parsers.families import MARKERS, marker_ids, marks_of, tokens_in
from kvferry.router.text.parsers.output_parser import CallParsing, Parsing
from kvferry.router.text.parsers.rules import either
from kvferry.router.text.parsers.syntax import grammar
from kvferry.router.text.parsers.thought_grammar import after_thought, can_limit
from kvferry.router.text.text_model import TextModel
from kvferry.structured_output import lark

BUDGET = "thinking_token_budget"
"""Field that bounds the reasoning."""


def parsing(text: TextModel, use: ToolUse | None, *, streams: bool, stops: bool, shown: bool = True) -> Parsing:
    """Return the parsing of a model's output, with reasoning if `shown`; raise InvalidRequest.

    `streams`: the output is shown as it comes. A call is shown before it is complete only if the grammar of `bounded`
    has begun to bound it, and so not if the client `stops` the output at tokens or texts of its own."""
    calls = None
    if use is not None:
        if text.dialect is None:
            raise InvalidRequest(
                f"{use.field}: the model {text.name!r} calls no tools here (--tool-call-parser none, or no chat "
                "template); tool_choice 'none' answers without tools",
                param=use.field,
            )
        schemas = {tool.name: tool.parameters for tool in use.tools}
        calls = CallParsing(
            text.dialect.parser,
            schemas,
            patient=not streams or (not use.forced and (stops or not text.channels)),
            named=use.named,
            marker=(marker := text.dialect.marker if streams and not stops else ""),
            marker_id=text.tokenizer.library.token_to_id(marker) if marker else None,
        )
    elif text.is_framed:
        assert text.dialect is not None
        calls = CallParsing(text.dialect.parser, {})
    marks = marks_of(text.dialect, text.thinking)
    return Parsing(text.thinking, calls, shown=shown, channels=text.channels, marks=marks)


def bounded(
    text: TextModel,
    use: ToolUse | None,
    requested: RequestedGrammar | None,
    prompt: Sequence[int],
    *,
    continued: bool,
    budget: int | None = None,
) -> RequestedGrammar | None:
    """Return the grammar for this prompt's output: tool calls, the requested format, or either.

    `requested` is the grammar of a text answer. `continued`: the prompt ends within a text answer. `budget`: maximum
    tokens of reasoning, for a model whose reasoning `limits_reasoning`. Raises InvalidRequest."""
    thinking = None if continued else text.thinking
    opened, budget = Parsing(thinking).opened(text.tokenizer, prompt), None if continued else budget
    try:
        answer = None if requested is None else lark_answer(requested[1])
    except (ValueError, RecursionError) as error:
        field = requested and requested[0]
        raise InvalidRequest(f"{field}: not valid JSON: {error}", param=field) from error
    if use is None or (requested is not None and answer is None):
        if use is not None and requested is not None:
            raise InvalidRequest(f"{requested[0]} of this kind cannot be combined with tools", param=requested[0])
        if requested is not None and budget is not None and answer is None:
            raise InvalidRequest(f"{requested[0]} of this kind cannot be combined with {BUDGET}", param=BUDGET)
        if (answer is None and budget is None) or (thinking is None and not text.channels):
            return requested
    if text.channels:
        return _on_channels(text, use, requested, answer, prompt, budget)
    if use is None:
        source = after_thought(_speller(text), thinking, opened, answer or "", budget)
        return requested[0] if requested is not None else BUDGET, Grammar("lark", source)
    dialect = text.dialect
    assert dialect is not None
    source = grammar(
        dialect.writer,
        use.tools,
        _speller(text),
        forced=use.forced,
        parallel=not dialect.is_led if use.parallel is None else use.parallel,
        led=dialect.is_led and not continued,
        thinking=thinking,
        opened=opened,
        answer=answer,
        budget=budget,
    )
    return use.place, Grammar("lark", source)


def limits_reasoning(text: TextModel) -> bool:
    """Return whether a budget can end the model's reasoning."""
    return text.channels or (text.thinking is not None and can_limit(text.thinking, _speller(text)))


def _on_channels(
    text: TextModel,
    use: ToolUse | None,
    requested: RequestedGrammar | None,
    answer: str | None,
    prompt: Sequence[int],
    budget: int | None,
) -> RequestedGrammar:
    """Return the grammar for a model whose output consists of messages on channels; see `bounded`."""
    source = harmony_syntax.grammar(
        () if use is None else use.tools,
        _speller(text, harmony.MARKERS),
        forced=use is not None and use.forced,
        parallel=use is not None and use.parallel is not False,
        lead=harmony.lead(text.tokenizer, prompt),
        answer=answer,
        budget=budget,
    )
    field = use.place if use is not None else requested[0] if requested is not None else BUDGET
    return field, Grammar("lark", source)


def lark_answer(grammar: Grammar) -> str | None:
    """Return the Lark text of an answer's grammar, for JSON or a choice of texts; None for other kinds."""
    options: dict[str, Any] = {"lenient": grammar.lenient}
    if grammar.whitespace is not None:
        options["whitespace"] = grammar.whitespace
    match grammar.kind:
        case "json_schema":
            return lark.schema(json.loads(grammar.source), **options)
        case "json_object":
            return lark.schema({"type": "object"}, **options)
        case "choice":
            return either([lark.text(each) for each in json.loads(grammar.source)])
    return None


def _speller(text: TextModel, markers: Iterable[str] = MARKERS) -> Callable[[str], str]:
    """Return a function that writes a text in Lark, with special tokens where the text has them."""
    tokens = {**marker_ids(text.tokenizer, markers), **tokens_in(text.tokenizer, marks_of(text.dialect, text.thinking))}
    return partial(lark.spelled, tokens, ends=text.facts.eos_token_ids)
