from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.template import ChatTemplate
from tests.api_parts import MESSAGES, Api, FakeCluster, demo_text, error_of, ids_of, says

EACH = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
CHOOSY = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['no_think', 'low', 'high'] %}"
    "{{ raise_exception('no such effort') }}{% endif %}{{ reasoning_effort }}" + EACH
)


def asked(source: str, *, strict: bool = False, **extra: Any) -> tuple[str, Rendering]:
    text = replace(demo_text(), template=ChatTemplate(source, {}), strict_templates=strict)
    found = text.rendering(MESSAGES, extra=extra)
    assert text.template is not None
    return text.template.render(found).removesuffix("[Hello]"), found


@pytest.mark.parametrize("said", ["enable_thinking", "thinking"])
@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
@pytest.mark.parametrize("value", [True, False])
def test_a_switch_reaches_the_template_under_its_own_name(said: str, name: str, value: bool) -> None:
    assert asked("{{ " + name + " }}" + EACH, **{said: value})[0] == str(value)


def test_the_template_s_own_name_has_the_last_word() -> None:
    source = "{{ enable_thinking }} {{ thinking }}" + EACH
    assert asked(source, enable_thinking=True, thinking=False)[0] == "True False"


@pytest.mark.parametrize(("effort", "switch"), [("none", "False"), ("low", "True"), ("high", "True"), ("odd", "")])
def test_an_effort_switches_reasoning(effort: str, switch: str) -> None:
    assert asked("{{ enable_thinking }}" + EACH, reasoning_effort=effort)[0] == switch
    assert asked("{{ enable_thinking }}" + EACH, reasoning_effort=effort, enable_thinking=False)[0] == "False"


@pytest.mark.parametrize(("switch", "shown"), [(True, "enabled -1"), (False, "disabled 0")])
def test_modes_and_budgets_are_switched_where_nothing_else_is(switch: bool, shown: str) -> None:
    source = "{{ thinking_mode }} {{ thinking_budget | default(-1) }}" + EACH
    assert asked(source, enable_thinking=switch)[0] == shown
    assert asked(source + "{{ thinking and '' }}", enable_thinking=switch)[0].startswith(" -1")


@pytest.mark.parametrize(
    ("effort", "shown"), [("none", "no_think"), ("medium", "low"), ("xhigh", "high"), ("high", "high")]
)
def test_an_effort_that_the_template_refuses_becomes_the_nearest(effort: str, shown: str) -> None:
    text, found = asked(CHOOSY, reasoning_effort=effort)
    assert (text, found.adaptations) == (shown, ("reasoning-effort-nearest",) if effort != shown else ())
    if effort != shown:
        with pytest.raises(InvalidRequest, match="no such effort"):
            asked(CHOOSY, strict=True, reasoning_effort=effort)


def test_templates_that_take_any_effort_get_it_as_it_is() -> None:
    text, found = asked("{{ reasoning_effort }}" + EACH, reasoning_effort="minimal")
    assert (text, found.adaptations) == ("minimal", ())


async def test_chats_may_switch_thinking_by_a_field_of_their_own() -> None:
    text = replace(demo_text(), template=ChatTemplate("{{ thinking }}" + EACH, {}))
    api = Api(FakeCluster(says("x")), text)
    await api.chat(enable_thinking=False)
    assert api.cluster.dispatches[-1].spec.token_ids == tuple(ids_of("False[Hello]"))
    await api.chat(enable_thinking=False, chat_template_kwargs={"enable_thinking": True})
    assert api.cluster.dispatches[-1].spec.token_ids == tuple(ids_of("True[Hello]"))


async def test_an_effort_that_nobody_knows_is_refused() -> None:
    """It stood in the prompt, or was ignored without a word."""
    source = "{% if reasoning_effort == 'ultra' %}!{% endif %}" + EACH
    api = Api(FakeCluster(says("x")), replace(demo_text(), template=ChatTemplate(source, {})))
    for effort, status in (("ultra", 200), ("minimal", 200), ("hihg", 400)):
        response = await api.http.post("/v1/chat/completions", json={"messages": MESSAGES, "reasoning_effort": effort})
        assert response.status_code == status
    assert error_of(response)["param"] == "reasoning_effort"
    response = await api.http.post("/v1/responses", json={"input": "x", "reasoning": {"effort": "hihg"}})
    assert (response.status_code, error_of(response)["param"]) == (400, "reasoning.effort")
    assert error_of(response)["message"].startswith("reasoning.effort must be one of none, ")
    body = {"max_tokens": 4, "messages": MESSAGES, "output_config": {"effort": "hihg"}}
    response = await api.http.post("/v1/messages", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("output_config.effort must be one of none, ")
