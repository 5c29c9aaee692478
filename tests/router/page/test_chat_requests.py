"""Settings, tools and reasoning of the chat page: what they become in requests, and what comes back of them."""

from __future__ import annotations

import json
from dataclasses import replace

from kvferry.router.text.template import ChatTemplate
from tests.api_parts import Api, FakeCluster, Script, demo_text, says, served
from tests.browser import Page
from tests.router.page.chat_tab import ENDED, answers, asked, opened, press_button, said, set_fields

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}:"
    "{{ m.reasoning_content or '' }}|{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "({{ c.function.arguments.place }}){% endfor %}<|im_end|>{% endfor %}{# <think> </think> #}"
)


def api_of(script: Script, template: str = TEMPLATE) -> Api:
    text = replace(demo_text(), template=ChatTemplate(template, {}), tool_call_parser="hermes")
    return Api(FakeCluster(script), text)


def prompts(api: Api) -> list[str]:
    decode = demo_text().tokenizer.decode
    return [decode(each.spec.token_ids, skip_special_tokens=False) for each in api.cluster.dispatches]


def test_settings_reach_the_request(tab: Page) -> None:
    api = api_of(says("Yes."))
    with served(api.app) as url:
        opened(tab, url)
        set_fields(
            tab, system="Be brief.", temperature="0.5", top_p="0.9", max_tokens="77", seed="5", more='{"top_k": 40}'
        )
        asked(tab, "Hello?")
    params = api.cluster.dispatches[0].spec.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.5, 0.9, 40, 77, 5)
    assert prompts(api) == ["<|im_start|>system:|Be brief.<|im_end|><|im_start|>user:|Hello?<|im_end|>"]


def test_settings_that_say_nothing_are_named(tab: Page) -> None:
    api = api_of(says("Yes."))
    with served(api.app) as url:
        opened(tab, url)
        for field, text, fault in (
            ("tools", "[{", "ot JSON: "), ("tools", '[{"type": "function"}]', "ach tool needs a name"),
            ("more", "[1]", "ot a JSON object"),
        ):  # fmt: skip
            set_fields(tab, **{field: text})
            assert fault in tab.evaluate(f"document.getElementById('{field}-fault').textContent")
            assert tab.evaluate(f"document.getElementById('{field}').ariaInvalid") == "true"
            asked(tab, "Hello?")
            assert fault in tab.evaluate("[...document.querySelectorAll('.turn > .wrong')].at(-1).innerText")
            set_fields(tab, **{field: ""})
        assert api.cluster.dispatches == []
        set_fields(tab, temperature="9")
        asked(tab, "Hello?")
        assert "temperature" in tab.evaluate("[...document.querySelectorAll('.turn > .wrong')].at(-1).innerText")
        set_fields(tab, temperature="")
        asked(tab, "Hello?")
        assert said(tab) == ["Hello?", "Yes."]
    tab.complaints.clear()  # the browser logs a 400 as an error


def test_a_call_is_shown_and_its_result_goes_back(tab: Page) -> None:
    api = api_of(answers(f"Let me see. {CALL}", "It rains.", "Good."))
    with served(api.app) as url:
        opened(tab, url)
        set_fields(tab, tools=json.dumps(TOOL), tool_choice="required")
        tab.wait("document.getElementById('settings-sum').textContent.includes('1 tool')")
        asked(tab, "Weather in Oslo?")
        assert said(tab) == ["Weather in Oslo?", "Let me see."]
        shown = tab.evaluate("document.querySelector('.call').innerText")
        assert "Calls get_weather" in shown
        assert '"place": "Oslo"' in shown
        assert "calls get_weather" in tab.evaluate("document.getElementById('told').textContent")
        tab.evaluate("document.querySelector('.call textarea').focus()")
        tab.type("12 °C, <b>rain</b>")
        press_button(tab, "Send the result")
        tab.wait(f"{ENDED} && document.body.innerText.includes('It rains.')")
        assert tab.evaluate("document.querySelector('.tool .code').innerText").split("\n")[-1] == "12 °C, <b>rain</b>"
        assert tab.evaluate("document.querySelectorAll('.call textarea').length") == 0
        asked(tab, "Thanks.")
        tab.reload()
        tab.wait("document.querySelectorAll('.turn').length === 6")
        assert "Calls get_weather" in tab.evaluate("document.querySelector('.call').innerText")
        assert tab.complaints == []
    first, second, _ = prompts(api)
    assert first == "[get_weather]<|im_start|>user:|Weather in Oslo?<|im_end|>"
    assert second.removeprefix(first) == (
        "<|im_start|>assistant:|Let me see. <tool_call>get_weather(Oslo)<|im_end|>"
        "<|im_start|>tool:|12 °C, <b>rain</b><|im_end|>"
    )
    assert api.cluster.dispatches[1].spec.work != api.cluster.dispatches[0].spec.work, "no second call is forced"


def test_a_call_that_nobody_answered_gets_a_result_all_the_same(tab: Page) -> None:
    api = api_of(answers(CALL, "Fine."))
    with served(api.app) as url:
        opened(tab, url)
        set_fields(tab, tools=json.dumps([{"type": "function", "function": TOOL}]))
        asked(tab, "Weather in Oslo?")
        asked(tab, "Never mind.")
        assert said(tab)[-1] == "Fine."
    assert "<|im_start|>tool:|No result was given.<|im_end|><|im_start|>user:|Never mind." in prompts(api)[1]


def test_reasoning_is_folded_and_sent_along(tab: Page) -> None:
    api = api_of(answers("<think>\nTwo *and* two.\n</think>\n\nFour.", "Yes."))
    with served(api.app) as url:
        opened(tab, url)
        asked(tab, "2+2?")
        assert said(tab) == ["2+2?", "Four."]
        fold = "document.querySelector('details.thought')"
        assert tab.evaluate(f"{fold}.open") is False
        assert tab.evaluate(f"{fold}.querySelector('summary').textContent").startswith("Thought for ")
        tab.evaluate(f"{fold}.querySelector('summary').click()")
        assert tab.evaluate(f"{fold}.querySelector('div').innerText") == "Two and two."
        asked(tab, "Sure?")
    assert "<|im_start|>assistant:Two *and* two.|Four.<|im_end|>" in prompts(api)[1]
