"""Reasoning marks as a template writes them, and the tokens that parsers of a derived syntax must see."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.router.text.parsers.families import DERIVED, REASONING, dialect, shown, thinking, tokens_in
from kvferry.router.text.parsers.reasoning import Thinking
from kvferry.router.text.template import ChatTemplate
from kvferry.router.text.transcript import TextOptions
from tests.api_parts import demo_text
from tests.router.text.derived.small_templates import HEAD, derived, syntax, template

USER = "{% for m in messages %}<|{{ m.role }}|>"
PROMPT = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
CASES = {
    "a mark": (
        f"{USER}{{% if m.reasoning_content %}}[THINK]{{{{ m.reasoning_content }}}}[/THINK]{{% endif %}}"
        f"{{{{ m.content }}}}{PROMPT}{{% endif %}}",
        Thinking(("[THINK]",), ("[/THINK]",)),
    ),
    "opened by the prompt": (
        f"{USER}{{% if m.role == 'assistant' %}}<x:think>\n{{{{ m.reasoning_content }}}}\n</x:think>\n\n{{% endif %}}"
        f"{{{{ m.content }}}}{PROMPT}<x:think>\n{{% endif %}}",
        Thinking(("<x:think>",), ("</x:think>",)),
    ),
    "written by the prompt alone": (
        f"{USER}{{% if m.reasoning %}}{{{{ m.reasoning }}}}\n[FINAL ANSWER]\n{{% endif %}}{{{{ m.content }}}}{PROMPT}"
        "Here are my steps:\n{% endif %}",
        Thinking(("Here are my steps:",), ("[FINAL ANSWER]",)),
    ),
    "an empty thought in the prompt": (
        f"{USER}{{% if m.thinking %}}<|think|>{{{{ m.thinking }}}}<|done|>{{% endif %}}{{{{ m.content }}}}{PROMPT}"
        "<|think|><|done|>{% endif %}",
        Thinking(("<|think|>",), ("<|done|>",)),
    ),
    "only where it is asked for": (
        f"{USER}{{% if enable_thinking and m.reasoning_content %}}<think>{{{{ m.reasoning_content }}}}</think>"
        f"{{% endif %}}{{{{ m.content }}}}{PROMPT}{{% endif %}}",
        Thinking(("<think>",), ("</think>",)),
    ),
    "a mark that ends other heads, too": (
        "{% for m in messages %}<|open|>{{ m.role }}<|sep|>{% if m.role == 'assistant' %}<|open|>think<|sep|>"
        "{{ m.reasoning_content }}<|close|>think<|sep|><|open|>response<|sep|>{% endif %}{{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|open|>assistant<|sep|>"
        "<|open|>{{ 'think' if thinking else 'response' }}<|sep|>{% endif %}",
        Thinking(("<|open|>think<|sep|>",), ("<|close|>think<|sep|><|open|>response<|sep|>",)),
    ),
    "none": (f"{USER}{{{{ m.content }}}}{PROMPT}{{% endif %}}{{# reasoning #}}", None),
    "no marks": (f"{USER}{{{{ m.reasoning_content }}}} {{{{ m.content }}}}{PROMPT}{{% endif %}}", None),
}


@pytest.mark.parametrize("case", CASES)
def test_marks_are_those_that_the_template_writes(case: str) -> None:
    source, expected = CASES[case]
    for each in (source, HEAD + source):
        assert ChatTemplate(each, {}).derived.thinking == expected


def test_marks_beside_calls_are_derived_too() -> None:
    assert derived("xml").thinking == Thinking(("<think>",), ("</think>",))


def test_names_replace_what_is_derived() -> None:
    own = Thinking(("<a>",), ("</a>",))
    assert thinking("auto", "</think>", own) == own
    assert thinking("auto", "</think>", None) == REASONING["qwen3"]
    assert thinking("granite", "</think>", own) == REASONING["granite"]
    assert thinking("none", "</think>", own) is None
    assert thinking("auto", "<|channel|>analysis", own) == REASONING["openai_gptoss"]


def test_names_replace_a_derived_syntax() -> None:
    model = replace(demo_text(), template=template("xml"))
    assert model.dialect is not None
    assert (model.dialect.family, model.dialect.own) == (DERIVED, True)
    for name in ("hermes", "llama3_json", "mistral", "pythonic"):
        found = replace(model, tool_call_parser=name).dialect
        assert found is not None
        assert (found.family, found.syntax, found.own) == (name, None, True)
    assert replace(model, tool_call_parser="none").dialect is None


def test_calls_that_no_parser_reads_are_described_in_the_prompt() -> None:
    """The template writes `<tool_call>`, but not Hermes' JSON; its calls would reach clients as text."""
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% endfor %}"
    source = f"{HEAD}{USER}{{{{ m.content }}}}{calls}{PROMPT}{{% endif %}}"
    known = ChatTemplate(source, {})
    found = dialect("auto", source, known.derived, knows_tools=True)
    assert found is not None
    assert (found.family, found.own) == ("hermes", False)


def test_parsers_see_the_tokens_of_their_marks() -> None:
    own = Tokenizer.from_str(demo_text().tokenizer.library.to_str())
    own.add_special_tokens([AddedToken(mark, normalized=False) for mark in ("<|call|>", "<|with|>", "<|other|>")])
    tokenizer = TextTokenizer(own)
    marks = (*syntax("numbered").literals(), "<think>")
    assert sorted(tokens_in(tokenizer, marks)) == ["<|call|>", "<|with|>"]
    seen = shown(tokenizer, TextOptions(), marks, channels=False)
    assert sorted(seen.values()) == ["<|call|>", "<|with|>"]
    assert shown(tokenizer, TextOptions(skip_special_tokens=False), marks, channels=False) == {}
