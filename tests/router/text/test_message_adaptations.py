from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.text.adaptations import RULES
from kvferry.router.text.template import ChatTemplate
from kvferry.router.text.text_model import TextModel
from tests.api_parts import demo_text

FORGIVING = "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}!{% endfor %}]{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0)"
    " or m.role not in ('user', 'assistant') %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
"""Refuses system messages too."""
ONE_SYSTEM = (
    "{% if messages[0].role == 'system' %}[system:{{ messages[0].content }}]{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.role }}:{{ m.content }}]{% endif %}"
    "{% endfor %}"
)
"""Drops a developer's messages and later ones of the system."""
NO_EMPTY = (
    "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
SINGLE_CALLS = (
    "{{ tools | default([], true) | tojson }}<tool_call>{% for m in messages %}"
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}!{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}"
)
NO_USER_AFTER_RESULTS = (
    "{{ tools | default([], true) | tojson }}<tool_call>{% for m in messages %}"
    "{% if m.role == 'user' and loop.index0 and messages[loop.index0 - 1].role == 'tool' %}"
    "{{ raise_exception('no user here') }}{% endif %}[{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}!{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}"
)


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def text_of(source: str, *, strict: bool = False) -> TextModel:
    return replace(demo_text(), template=ChatTemplate(source, {}), strict_templates=strict, tool_call_parser="hermes")


def adapted(source: str, *messages: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    text = text_of(source)
    asked = text.rendering(messages)
    assert text.template is not None
    return text.template.render(asked), asked.adaptations


CHAT = (says("user", "a"), says("assistant", "b"), says("user", "c"))
CASES = [
    (ONE_SYSTEM, (says("developer", "d"), says("user", "a")), "[system:d][user:a]", ("developer-as-system",)),
    (
        ONE_SYSTEM,
        (says("system", "s"), says("developer", "d"), says("user", "a")),
        "[system:s\n\nd][user:a]",
        ("developer-as-system", "system-messages-merged"),
    ),
    (
        ONE_SYSTEM,
        (*CHAT[:2], says("system", "s"), CHAT[2]),
        "[user:a][assistant:b][user:s][user:c]",
        ("system-as-user",),
    ),
    (ALTERNATING, (says("system", "s"), says("user", "a")), "[user:s\n\na]", ("system-in-user",)),
    (
        ALTERNATING,
        (says("developer", "d"), *CHAT[:2], says("system", "s"), CHAT[2]),
        "[user:d\n\na][assistant:b][user:s\n\nc]",
        ("developer-as-system", "system-as-user", "system-in-user", "user-messages-merged"),
    ),
    (ALTERNATING, (says("user", "a"), says("user", "b")), "[user:a\n\nb]", ("user-messages-merged",)),
    (
        ALTERNATING,
        (*CHAT[:2], says("assistant", "x"), CHAT[2]),
        "[user:a][assistant:b\n\nx][user:c]",
        ("assistant-messages-merged",),
    ),
    (
        ALTERNATING,
        (says("assistant", "hi"), says("user", "a")),
        "[user:][assistant:hi][user:a]",
        ("user-inserted",),
    ),
    (
        NO_EMPTY,
        (says("user", "a"), says("assistant", ""), says("user", "c")),
        "[user:a][user:c]",
        ("empty-assistant-dropped",),
    ),
]


@pytest.mark.parametrize(("source", "messages", "expected", "names"), CASES)
def test_what_a_template_refuses_or_drops_is_adapted(
    source: str, messages: tuple[dict[str, Any], ...], expected: str, names: tuple[str, ...]
) -> None:
    assert adapted(source, *messages) == (expected, names)


@pytest.mark.parametrize(("source", "messages"), [case[:2] for case in CASES])
def test_a_template_that_takes_them_gets_the_messages_as_they_are(
    source: str, messages: tuple[dict[str, Any], ...]
) -> None:
    shown, names = adapted(FORGIVING, *messages)
    assert names == ()
    assert shown == "".join(f"[{each['role']}:{each['content']}]" for each in messages)


@pytest.mark.parametrize(("source", "messages"), [case[:2] for case in CASES if case[0] != ONE_SYSTEM])
def test_strict_templates_refuse(source: str, messages: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(InvalidRequest, match="refused the messages"):
        text_of(source, strict=True).render(messages)


def called(*ids: str) -> dict[str, Any]:
    calls = [{"id": each, "type": "function", "function": {"name": each, "arguments": "{}"}} for each in ids]
    return says("assistant", "", tool_calls=calls)


def test_parallel_calls_become_messages_of_their_own_each_with_its_result() -> None:
    history = (
        says("user", "a"),
        called("f", "g"),
        says("tool", "G", tool_call_id="g"),
        says("tool", "F", tool_call_id="f"),
    )
    shown, names = adapted(SINGLE_CALLS, *history, says("user", "c"))
    assert names == ("parallel-calls-split",)
    assert shown.endswith("[user:a][assistant:!f {}][tool:F][assistant:!g {}][tool:G][user:c]")
    alone, none = adapted(SINGLE_CALLS, says("user", "a"), called("f"), says("tool", "F", tool_call_id="f"))
    assert (none, alone.endswith("[user:a][assistant:!f {}][tool:F]")) == ((), True)


def test_what_a_user_says_behind_a_result_joins_it() -> None:
    history = (says("user", "a"), called("f"), says("tool", "F", tool_call_id="f"), says("user", "c"))
    shown, names = adapted(NO_USER_AFTER_RESULTS, *history)
    assert (shown.endswith("[user:a][assistant:!{}][tool:F\n\nc]"), names) == (True, ("user-in-result",))


def test_the_longest_conversations_are_adapted_in_linear_time() -> None:
    """Joining message by message had copied 64 GiB for a body of 16 MiB."""
    many, long = 8192, "x" * 2048
    calls = called(*(f"f{place}" for place in range(many)))
    results = [says("tool", long, tool_call_id=f"f{place}") for place in reversed(range(many))]
    begun = time.process_time()
    for rule in RULES:
        rule.apply([says("user", long)] * many)
        rule.apply([calls, *results])
        rule.apply([calls, results[0], *[says("user", long)] * many])
    assert time.process_time() - begun < 5


def test_an_empty_last_message_stays_for_its_continuation() -> None:
    text = text_of(NO_EMPTY)
    with pytest.raises(InvalidRequest, match="refused"):
        text.render([says("user", "a"), says("assistant", "")], continue_final_message=True)


def test_a_template_that_shows_nothing_needs_no_rules() -> None:
    template = text_of("fixed").template
    assert template is not None
    assert template.traits.rules == ()


def test_rules_have_names_of_their_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
