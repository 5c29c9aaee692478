from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jinja2 import nodes

from kvferry.protocol.errors import ConfigError, InvalidRequest
from kvferry.router.text.cheap_templates import CheapSandbox
from kvferry.router.text.template import MAX_SOURCE, ChatTemplate
from kvferry.router.text.text_model import TextModel
from tests.api_parts import demo_text

USER = {"role": "user", "content": "Hi"}
CHATML = (
    "{% for message in messages %}\n"
    "    {% if true %}\n"
    "{{ '<' + message['role'] + '>' + message['content'] + '</>' }}\n"
    "    {% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def text_of(template: ChatTemplate) -> TextModel:
    return replace(demo_text(), template=template)


def render(source: str, messages: Any = (USER,), **options: Any) -> str:
    return text_of(ChatTemplate(source, {"bos_token": "<s>"})).render(messages, **options)


def test_the_demo_models_own_template() -> None:
    assert demo_text().render([USER]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_is_compiled_once_and_one_for_tools_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    parse = CheapSandbox._parse

    def counted(self: CheapSandbox, source: str, name: str | None, filename: str | None) -> nodes.Template:
        compiled.append(source)
        return parse(self, source, name, filename)

    monkeypatch.setattr(CheapSandbox, "_parse", counted)
    ChatTemplate(CHATML, {})
    assert compiled == [CHATML]
    ChatTemplate(CHATML, {}, tool_use=CHATML + "!")
    assert compiled[1:] == [CHATML, CHATML + "!"]


def test_blocks_are_trimmed_as_models_expect() -> None:
    assert render(CHATML) == "<user>Hi</>\n<assistant>"
    assert render(CHATML, add_generation_prompt=False) == "<user>Hi</>\n"


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(CHATML, [{"role": "user", "content": parts}]) == "<user>one\ntwo</>\n<assistant>"


def test_a_template_that_wants_parts_gets_parts() -> None:
    source = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert render(source) == "[Hi]"


def test_absent_content_is_empty() -> None:
    assert render(CHATML, [{"role": "assistant", "content": None}, {"role": "tool"}]) == (
        "<assistant></>\n<user><tool_response>\n\n</tool_response></>\n<assistant>"
    )


def test_parts_other_than_text_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="image_url") as caught:
        render(CHATML, [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert caught.value.param == "messages[1].content[0]"


def test_tojson_does_not_escape_html_and_keeps_unicode() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ {'b': 1} | tojson(indent=2) }}") == '{\n  "b": 1\n}'


def test_globals_special_tokens_and_extra_variables() -> None:
    assert render("{{ bos_token }}{{ strftime_now('%Y') | length }}{{ mood }}", extra={"mood": "x"}) == "<s>4x"
    assert render("{% generation %}said{% endgeneration %}") == "said"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"


def test_tools_choose_their_own_template_and_arguments_are_objects() -> None:
    both = ChatTemplate(
        "plain",
        {},
        tool_use="{{ tools | length }}{# <tool_call> #}{{ messages[0].tool_calls[0].function.arguments.x }}",
    )
    text = text_of(both)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 5}'}}]}
    assert text.render([call], tools=[{}, {}]) == "25"
    assert text.render([USER]) == "plain"


def test_the_final_message_can_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "Well, "}]
    shown = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert shown == "<user>Hi</>\n<assistant>Well,"
    with pytest.raises(InvalidRequest):
        render(CHATML, [{"role": "assistant", "content": ""}], continue_final_message=True)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('roles must alternate') }}", "{{ messages.missing.deep }}", "{{ 1 / 0 }}"]
)
def test_whatever_fails_in_a_template_is_the_messages_fault(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


def test_reserved_variables_cannot_be_replaced() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(CHATML, extra={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_a_broken_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not parse"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(ConfigError, match="no_such_filter"):
        ChatTemplate("{{ messages | no_such_filter }}", {})
    with pytest.raises(ConfigError, match="the limit is"):
        ChatTemplate("x" * (MAX_SOURCE + 1), {})


def test_a_template_that_needs_all_memory_to_compile_is_refused() -> None:
    constant = "{{ 'x' | center(1048576) | replace('', 'y' | center(60)) | list | list | length }}"
    with pytest.raises(ConfigError, match="cannot be compiled within 256 MiB of memory"):
        ChatTemplate(constant, {}, tool_use=constant + " ")


def test_a_template_of_costly_operations_is_read_as_others_are() -> None:
    source = "{% for m in messages %}{{ m.content | list | join }}{% endfor %}"
    assert not ChatTemplate(source, {}).cheap
    assert (ChatTemplate(source, {}).wants_parts, ChatTemplate(source, {}).takes_system) == (False, True)
    assert render(source) == "Hi"
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text | list | join }}{% endfor %}{% endfor %}"
    assert ChatTemplate(parts, {}).wants_parts
    assert render(parts) == "Hi"


@pytest.mark.parametrize(
    "condition",
    [
        "message.role == 'observation'",
        "message['role'] in ['observation', 'other']",
        "'observation' == message['role']",
        "role != 'observation'",
    ],
)
def test_roles_that_a_template_names_are_allowed_and_others_are_not(condition: str) -> None:
    source = "{% for message in messages %}{% if " + condition + " %}!{% endif %}{{ message.content }}{% endfor %}"
    assert render(source, [{"role": "observation", "content": "seen"}]).endswith("seen")
    with pytest.raises(InvalidRequest, match="function, observation") as caught:
        render(source, [USER, {"role": "content", "content": "x"}])
    assert caught.value.param == "messages[1].role"
