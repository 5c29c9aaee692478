"""Budgets of reasoning: the grammar ends a thought that has spent its tokens, and leaves shorter ones alone."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher

from kvferry.router.text.parsers.families import REASONING
from kvferry.router.text.parsers.rules import Spell
from kvferry.router.text.parsers.thought_grammar import after_thought, can_limit
from kvferry.structured_output import lark
from tests.router.text.test_tool_grammars import accepts, begins, tokenizers, written

QWEN = REASONING["qwen3"]
LONG = "one two three four five six seven eight"
"""A thought of eight tokens."""


def spell(marker: str) -> str:
    token_id = tokenizers(marked=True)[0].token_to_id(marker)
    return lark.text(marker) if token_id is None else lark.token(token_id)


def forced_after(source: str, text: str) -> list[str]:
    """Return the tokens that must follow the text."""
    tokenizer, library = tokenizers(marked=True)
    matcher = LLMatcher(library, LLMatcher.grammar_from_lark(source), log_level=0)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert matcher.try_consume_tokens(ids) == len(ids)
    return [tokenizer.id_to_token(token) for token in matcher.compute_ff_tokens()]


def test_a_thought_that_spent_its_budget_must_end() -> None:
    assert len(tokenizers(marked=True)[0].encode(LONG, add_special_tokens=False).ids) == 8
    source = after_thought(spell, QWEN, opened=True, answer="", budget=8)
    assert forced_after(source, LONG) == ["</think>"]
    assert accepts(source, f"{LONG}</think>\n\nAn answer, as long as it likes to be, is free.", marked=True)
    assert not begins(source, f"{LONG} nine", marked=True)


def test_a_shorter_thought_ends_where_it_likes() -> None:
    source = after_thought(spell, QWEN, opened=True, answer="", budget=8)
    assert forced_after(source, "one two") == []
    assert accepts(source, f"one two</think>{LONG} nine ten eleven", marked=True)


def test_a_budget_of_zero_ends_the_thought_at_once() -> None:
    assert forced_after(after_thought(spell, QWEN, opened=True, answer="", budget=0), "") == ["</think>"]


def test_a_thought_that_the_model_opens_is_bounded_and_may_be_missing() -> None:
    source = after_thought(spell, QWEN, opened=False, answer="", budget=8)
    assert accepts(source, "No thought, but an answer that is longer than the budget of one.", marked=True)
    assert forced_after(source, f"<think>{LONG}") == ["</think>"]


@pytest.mark.parametrize("forced", [False, True])
def test_calls_follow_a_bounded_thought(forced: bool) -> None:
    source = written("hermes", marked=True, forced=forced, thinking=QWEN, opened=True, budget=8)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(source, f"{LONG}</think>\n\n{call}", marked=True)
    assert forced_after(source, LONG) == ["</think>"]


def test_only_a_token_can_end_a_thought() -> None:
    plain: Spell = lark.text
    assert can_limit(QWEN, spell)
    assert not can_limit(QWEN, plain)
    assert not can_limit(REASONING["granite"], spell)
