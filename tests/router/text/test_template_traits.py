from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvferry.router.text.call_ids import IdForm
from kvferry.router.text.template import ChatTemplate
from kvferry.router.text.text_model import TextModel
from tests.api_parts import demo_text

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
HEAD = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
EACH = "{% for m in messages %}[{{ m.role }}:{{ m.content }}"


def calls(inner: str, result: str = "") -> str:
    called = f"{{% for c in m.tool_calls %}}{inner}{{% endfor %}}"
    return f"{HEAD}{EACH}{called}{{% if m.role == 'tool' %}}{result}{{% endif %}}]{{% endfor %}}"


OBJECTS = calls("!{{ c.function.name }} {{ c.function.arguments | tojson }}")
ITEMS = calls("!{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}")
ADDED = calls("{{ '!' + c.function.name + ' ' + c.function.arguments }}")
PRINTED = calls("!{{ c.function.name }} {{ c.function.arguments }}")
EITHER = calls(
    "!{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}"
)
NINE = calls(
    "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    "!{{ c.id }} {{ c.function.arguments | tojson }}",
    "#{{ m.tool_call_id }}",
)
BY_ID = calls("!{{ c.id }} {{ c.function.arguments | tojson }}", "#{{ m.tool_call_id }}")
COUNTED = HEAD + (
    "{% set n = namespace(i=0) %}" + EACH + "{% for c in m.tool_calls %}!functions.{{ c.function.name }}:{{ n.i }} "
    "{{ c.function.arguments | tojson }}{% set n.i = n.i + 1 %}{% endfor %}"
    "{% if m.role == 'tool' %}#{{ m.tool_call_id }}{% endif %}]{% endfor %}"
)
NAMED = calls("!{{ c.function.name }} {{ c.function.arguments | tojson }}", "#{{ m.name }}")
QUEUED = HEAD + (
    "{% set q = namespace(ids=[]) %}" + EACH + "{% for c in m.tool_calls %}!{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% set _ = q.ids.append(c.id) %}{% endfor %}"
    "{% if m.role == 'tool' %}#{{ q.ids.pop(0) }}{% endif %}]{% endfor %}"
)


def text_of(source: str) -> TextModel:
    return replace(demo_text(), template=ChatTemplate(source, {}), tool_call_parser="hermes")


def call(id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    own = {} if id is None else {"id": id}
    return {**own, "type": "function", "function": {"name": name, "arguments": arguments}}


def history(*made: dict[str, Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": list(made)},
        *({"role": "tool", "content": "r", **each} for each in results),
    ]


def shown(source: str, messages: list[dict[str, Any]]) -> str:
    text = text_of(source).render(messages, tools=TOOLS)
    return text[text.index("[user") :]


ARGUMENTS = {"city": "Róm\n", "n": [1, True, None]}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)


@pytest.mark.parametrize("given", [ARGUMENTS, WRITTEN])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (OBJECTS, f"!f {WRITTEN}"),
        (ITEMS, '!city="Róm\\n";n=[1, true, null];'),
        (ADDED, f"!f {WRITTEN}"),
        (PRINTED, f"!f {WRITTEN}"),
        (EITHER, f"!{WRITTEN}"),
    ],
)
def test_arguments_are_objects_or_text_as_the_template_writes_json(source: str, expected: str, given: Any) -> None:
    """Never Python's spelling of an object, and never JSON within JSON."""
    found = shown(source, history(call("abcdefghi", "f", given), results=[{"tool_call_id": "abcdefghi"}]))
    assert found.startswith(f"[user:a][assistant:{expected}][tool:r")


def test_tools_are_described_where_the_template_reads_their_variable_and_shows_none() -> None:
    """Command A's plain template sets `tools` itself; a client's tools were dropped without a word."""
    body = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + EACH + "]{% endfor %}"
    for source, shows in ((body, True), ("{% set tools = [] %}" + body, False)):
        text = replace(demo_text(), template=ChatTemplate(source, {}))
        assert text.shows_tools == shows
        prompt = text.render([{"role": "user", "content": "a"}], tools=TOOLS)
        assert ("You may call" in prompt, '"name": "f"' in prompt) == (not shows, True)


def test_tools_that_only_a_system_message_brings_are_shown() -> None:
    source = "{% if messages[0].role == 'system' %}<tool_call>{{ tools | tojson }}{% endif %}" + EACH + "]{% endfor %}"
    assert ChatTemplate(source, {}).knows_tools


def test_text_arguments_are_the_client_s_own_text() -> None:
    found = shown(ADDED, history(call("abcdefghi", "f", '{"a":1}'), results=[]))
    assert '!f {"a":1}' in found


def test_ids_of_any_server_become_nine_letters_where_the_template_checks_that() -> None:
    ids = ["call_2f0c8d0e5a", "toolu_01XYZ", "abcdefghi"]
    made = [call(each, "f", "{}") for each in ids]
    found = shown(NINE, history(*made, results=[{"tool_call_id": each} for each in reversed(ids)]))
    written = [part.split(" ")[0] for part in found.split("!")[1:]]
    answered = [part.split("]")[0] for part in found.split("#")[1:]]
    assert answered == written[::-1]
    assert len(set(written)) == 3
    assert all(len(each) == 9 and each.isalnum() for each in written)
    assert written[2] == "abcdefghi"
    assert found == shown(NINE, history(*made, results=[{"tool_call_id": each} for each in reversed(ids)]))


@pytest.mark.parametrize("source", [BY_ID, COUNTED])
def test_ids_carry_name_and_index_where_nothing_else_names_the_function(source: str) -> None:
    messages = history(
        call("x", "f", "{}"), call("y", "g", "{}"), results=[{"tool_call_id": "y"}, {"tool_call_id": "x"}]
    )
    messages += history(call("x", "g", "{}"), results=[{"tool_call_id": "x"}])[1:]
    found = shown(source, messages)
    assert "!functions.f:0 {}!functions.g:1 {}]" in found
    assert "[tool:r#functions.g:1][tool:r#functions.f:0]" in found
    assert found.endswith("!functions.g:2 {}][tool:r#functions.g:2]")
    kept = history(call("functions.f:7", "f", "{}"), results=[{"tool_call_id": "functions.f:7"}])
    assert shown(BY_ID, kept).endswith("!functions.f:7 {}][tool:r#functions.f:7]")


def test_other_ids_stay_and_missing_ones_are_made_and_matched() -> None:
    source = calls("!{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}", "#{{ m.tool_call_id }}")
    assert "!toolu_1 f {}][tool:r#toolu_1]" in shown(
        source, history(call("toolu_1", "f", "{}"), results=[{"tool_call_id": "toolu_1"}])
    )
    made = [call(None, "f", "{}"), call(None, "g", "{}")]
    found = shown(source, history(*made, results=[{"name": "g"}, {"name": "f"}]))
    assert found.endswith("!call_0 f {}!call_1 g {}][tool:r#call_1][tool:r#call_0]")


def test_results_get_the_name_of_their_call_where_the_template_shows_it() -> None:
    messages = history(
        call("x", "f", "{}"), call("y", "g", "{}"), results=[{"tool_call_id": "y"}, {"tool_call_id": "x"}]
    )
    assert shown(NAMED, messages).endswith("[tool:r#g][tool:r#f]")


def test_the_functions_of_older_clients_are_calls_and_results() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "r"},
    ]
    assert shown(NAMED, messages) == '[user:a][assistant:!f {"x": 1}][tool:r#f]'


def test_a_template_may_keep_a_queue_of_its_own() -> None:
    messages = history(call("x", "f", "{}"), call("y", "g", "{}"), results=[{}, {}])
    assert shown(QUEUED, messages).endswith("[tool:r#x][tool:r#y]")


def test_tools_are_an_empty_list_only_where_none_is_refused() -> None:
    loop = "{% for t in tools %}<tool_call>{{ t.function.name }}{% endfor %}" + EACH + "]{% endfor %}"
    assert text_of(loop).render([{"role": "user", "content": "a"}]) == "[user:a]"
    assert (
        text_of("{{ tools is none }}" + EACH + "]{% endfor %}").render([{"role": "user", "content": "a"}])
        == "True[user:a]"
    )


def test_fields_that_are_null_are_left_out() -> None:
    source = EACH + "{{ m.tool_calls is defined }}{{ m.refusal is defined }}]{% endfor %}"
    message = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}
    assert text_of(source).render([{"role": "user", "content": "a"}, message]).endswith("[assistant:FalseFalse]")


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_reasoning_reaches_templates_under_their_name(field: str, name: str) -> None:
    source = EACH + "{{ m." + name + " }}]{% endfor %}"
    message = {"role": "assistant", "content": "b", field: "hmm"}
    assert text_of(source).render([{"role": "user", "content": "a"}, message]).endswith("[assistant:bhmm]")


def test_generators_are_written_as_json_lists() -> None:
    source = "{{ messages | map(attribute='content') | tojson }}"
    assert text_of(source).render([{"role": "user", "content": "a"}]) == '["a"]'


def test_calls_that_are_shown_only_without_content_get_none() -> None:
    """As in the first templates of DeepSeek R1; content beside calls is a message of its own before them."""
    shown = "{% if m.content is none %}!{{ c.function.name + c.function.arguments }}{% endif %}"
    text = text_of(calls(shown))
    assert text.template is not None
    assert text.template.traits.null_content
    made = call("c0", "f", {"a": 1})
    messages = history(made, results=[{"role": "tool", "tool_call_id": "c0", "content": "r"}])
    assert '[assistant:None!f{"a": 1}]' in text.render(messages)
    said = [{**each, "content": "Said."} if each["role"] == "assistant" else each for each in messages]
    assert '[assistant:Said.][assistant:None!f{"a": 1}]' in text.render(said)


def test_traits_of_the_forms() -> None:
    forms = {source: text_of(source).template for source in (OBJECTS, ADDED, NINE, BY_ID, COUNTED, NAMED)}
    found = {source: each.traits for source, each in forms.items() if each is not None}
    assert [found[each].text_arguments for each in (OBJECTS, ADDED)] == [False, True]
    assert [found[each].ids for each in (OBJECTS, NINE, BY_ID, COUNTED)] == [
        IdForm.ANY, IdForm.NINE, IdForm.INDEXED, IdForm.INDEXED,
    ]  # fmt: skip
    assert [found[each].names_results for each in (OBJECTS, NAMED)] == [False, True]
