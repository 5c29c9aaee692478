"""The chat page for everybody: by keyboard alone, read aloud, on a phone, in light and dark."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_parts import Api, FakeCluster, served
from tests.browser import Page
from tests.router.page.chat_tab import ENDED, WIDER, answers, ask, asked, opened, press_button, said, set_fields

LONG = (
    "# A title that is longer than a phone is wide: Donaudampfschifffahrtselektrizitätenhauptbetriebswerk\n"
    "A `code_word_that_does_not_end_before_the_phone_does_because_somebody_wrote_it_without_any_spaces_in_it` and "
    "https://example.com/a/path/that/is/longer/than/the/phone/is/wide/and/has/no/spaces/in/it/either\n\n"
    "```python\nprint('a line that is much longer than a phone is wide, and must not make the page wider')\n```\n\n"
    "| a column | another column | a third column | a fourth column | a fifth column |\n|---|---|---|---|---|\n"
    "| wwwwwwwwwwwwwwww | wwwwwwwwwwwwwwwww | wwwwwwwwwwwwwwww | wwwwwwwwwwwwwwww | wwwwwwwwwwwwwwww |\n\n"
    "مرحبا بالعالم، هذا نص من اليمين إلى اليسار.\n\n> quoted\n\n- [x] done\n"
)
CONTRAST = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (v) => v / 255 <= .04045 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(linear)
    .reduce((sum, v, at) => sum + v * [.2126, .7152, .0722][at], 0);
  const ground = (node) => { for (; node; node = node.parentElement) {
    const found = parse(getComputedStyle(node).backgroundColor);
    if (found.length === 3 || found[3] === 1) return found; }
    return [255, 255, 255]; };
  const poor = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !node.checkVisibility({ visibilityProperty: true })) continue;
    if (['SCRIPT', 'STYLE'].includes(node.tagName) || node.closest('.skip, .hidden, :disabled')) continue;
    const one = light(parse(getComputedStyle(node).color)), other = light(ground(node));
    const ratio = (Math.max(one, other) + .05) / (Math.min(one, other) + .05);
    count += 1;
    if (ratio < 4.5) poor.push([node.className || node.tagName, texts.currentNode.data.slice(0, 30), ratio.toFixed(2)]);
  }
  return { poor, count };
})()"""


@pytest.fixture(scope="module")
def full(tab: Page) -> Iterator[Page]:
    """A page that shows everything that it has: answers, versions, an error, reasoning off, two conversations."""
    cluster = FakeCluster(answers("One.", LONG), cached=8)
    with served(Api(cluster).app) as url:
        opened(tab, url)
        asked(tab, "An earlier conversation with a title that is long enough to be cut somewhere")
        press_button(tab, "New chat")
        tab.wait("!document.querySelector('.turn')")
        asked(tab, "Question\nwithaverylongwordthatgoesonandonandonandonandonandonandonandonandonandon")
        press_button(tab, "Regenerate this answer")
        tab.wait(f"{ENDED} && chat.current.turns.length === 3")
        set_fields(tab, temperature="9")
        asked(tab, "An error")
        tab.complaints.clear()  # the browser logs a 400 as an error
        yield tab


def test_everything_has_a_name_for_those_who_cannot_see_it(full: Page) -> None:
    full.evaluate("document.getElementById('open-settings').click()")
    names = full.names()
    for role in ("textbox", "button", "combobox", "spinbutton"):
        assert names[role]
        assert all(names[role]), (role, names[role])
    assert "Settings" in names["dialog"]
    full.press("Escape")
    full.wait("!document.getElementById('settings').open")
    names = full.names()
    for role in ("textbox", "button", "combobox", "navigation", "main", "article", "figure", "link"):
        assert names[role], role
        assert role == "article" or all(names[role]), (role, names[role])
    assert "Message" in names["textbox"]
    assert "Copy code" in names["button"]
    if where := os.environ.get("KEEP_SCREENSHOT"):
        full.screenshot(Path(where), 900, 700)


@pytest.mark.parametrize("width", [1280, 768, 390, 320])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_never_wider_than_its_window_and_its_text_stands_out(full: Page, width: int, scheme: str) -> None:
    full.resize(width, 844, scheme)
    for state in (
        "1",
        "toggleList(true)",
        "toggleList(false)",
        "openSettings()",
        "document.getElementById('settings').close()",
    ):
        full.evaluate(state)
        assert not full.evaluate(WIDER), state
        outside = full.evaluate(
            "[...document.querySelectorAll('button, textarea, select, .said, .facts li, h2')].filter((node) => {"
            " const box = node.getBoundingClientRect(); return node.checkVisibility({ visibilityProperty: true })"
            " && !node.closest('.skip, .hidden') && (box.left < -1 || box.right > innerWidth + 1); })"
            ".map((node) => node.outerHTML.slice(0, 80))"
        )
        full.wait("document.getAnimations().every((each) => each.playState !== 'running')")
        assert outside == [] or state == "toggleList(true)", (state, outside)
        told = full.evaluate(CONTRAST)
        assert told["count"] > 10
        assert told["poor"] == [], state


def test_right_to_left_text_runs_that_way_and_code_does_not(full: Page) -> None:
    full.resize(1280, 844)
    runs = "[...document.querySelectorAll('.said p')].filter((node) => node.innerText.includes('مرحبا'))"
    assert full.evaluate(f"{runs}.map((node) => getComputedStyle(node).direction)") == ["rtl"]
    assert full.evaluate("getComputedStyle(document.querySelector('pre code')).direction") == "ltr"


def focused(page: Page) -> str:
    node = "document.activeElement"
    return str(page.evaluate(f"{node}.ariaLabel || {node}.id || {node}.textContent.trim() || {node}.localName"))


def tab_to(page: Page, name: str, *, back: bool = False) -> list[str]:
    """Press Tab until something of this name has the focus; the names on the way."""
    way: list[str] = []
    while not way or way[-1] != name:
        page.press("Tab", shift=back)
        way.append(focused(page))
        assert len(way) < 60, way
    return way


def test_a_conversation_by_keyboard_alone(tab: Page) -> None:
    with served(Api(FakeCluster(answers("First.", "Second.", "```js\nlet code;\n```", "Fourth."))).app) as url:
        opened(tab, url)
        assert focused(tab) == "Message"
        tab.type("One?")
        tab.press("Enter")
        tab.wait(f"{ENDED} && document.body.innerText.includes('First.')")
        assert focused(tab) == "Message"
        tab_to(tab, "Regenerate this answer", back=True)
        tab.press("Enter")
        tab.wait(f"{ENDED} && document.body.innerText.includes('Second.')")
        assert focused(tab) == "Message"
        tab.press("ArrowUp")
        assert focused(tab) == "Edit the question"
        tab.press("Escape")
        assert focused(tab) == "Edit this question"
        tab.press("Enter")
        tab.type("Two?")
        tab.press("Enter")
        tab.wait(f"{ENDED} && document.querySelector('figure')")
        tab_to(tab, "Copy code", back=True)
        tab.press("Enter")
        tab.wait("document.querySelector('figcaption button').textContent === 'Copied'")
        tab_to(tab, "open-settings")
        tab.press("Enter")
        assert tab.evaluate("document.getElementById('settings').open")
        tab.press("Escape")
        tab.wait("document.activeElement.id === 'ask'")
        assert not tab.evaluate("document.getElementById('settings').open")
        tab_to(tab, "fresh", back=True)
        tab.press("Enter")
        tab.wait("!document.querySelector('.turn')")
        assert focused(tab) == "Message"
        assert tab.complaints == []


def test_the_focus_goes_down_the_page(tab: Page) -> None:
    with served(Api(FakeCluster(answers("First."))).app) as url:
        opened(tab, url)
        asked(tab, "One?")
        tab.wait("document.querySelector('#list a')")
        tab.evaluate("document.querySelector('.skip').focus()")
        way = tab_to(tab, "Send")
        order = [
            "fresh",
            "model",
            "Conversation",
            "Edit this question",
            "Regenerate this answer",
            "Message",
            "open-settings",
            "Send",
        ]
        assert [name for name in way if name in order] == order


def test_copied_text_is_what_the_model_wrote(tab: Page) -> None:
    text = "**Bold** and `code`"
    with served(Api(FakeCluster(answers(text))).app) as url:
        opened(tab, url)
        tab.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        asked(tab, "One?")
        for insecure in (False, True):
            if insecure:
                tab.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
            tab.evaluate("document.querySelector('[aria-label=\"Copy this answer\"]').focus()")
            tab.press("Enter")
            tab.wait("document.getElementById('told').textContent === 'Copied to the clipboard.'")
            assert focused(tab) == "Copy this answer"
            tab.evaluate("announce('')")
        assert tab.complaints == []


def test_on_a_phone_the_list_comes_over_the_page(tab: Page) -> None:
    with served(Api(FakeCluster(answers("First."))).app) as url:
        opened(tab, url)
        asked(tab, "One?")
        tab.resize(390, 844)
        shown = "document.getElementById('fresh').checkVisibility({ visibilityProperty: true })"
        assert not tab.evaluate(shown)
        assert tab.evaluate("document.getElementById('open-list').ariaExpanded") == "false"
        press_button(tab, "Chats")
        tab.wait(shown)
        assert focused(tab) == "fresh"
        tab.press("Escape")
        assert not tab.evaluate(shown)
        assert focused(tab) == "open-list"
        press_button(tab, "Chats")
        press_button(tab, "New chat")
        tab.wait(f"!({shown}) && !document.querySelector('.turn')")


def test_a_reader_who_scrolled_up_is_left_there(tab: Page) -> None:
    text = "\n\n".join(f"Paragraph {number}." for number in range(60))
    with served(Api(FakeCluster(answers(text), gap_s=0.005)).app) as url:
        opened(tab, url)
        ask(tab, "One?")
        tab.wait("document.getElementById('log').scrollTop > 200")
        tab.evaluate("document.getElementById('log').scrollTop = 0")
        tab.wait(ENDED)
        assert tab.evaluate("document.getElementById('log').scrollTop") == 0
        assert said(tab)[1].endswith("Paragraph 59.")
        tab.wait("!document.getElementById('latest').hidden")
        press_button(tab, "Go to the latest")
        tab.wait("isNearEnd() && document.getElementById('latest').hidden")


def test_names_of_hostile_models_and_tools_are_text(tab: Page) -> None:
    nasty = "<img src=x onerror=hit()>"
    with served(Api(FakeCluster(answers("First."))).app) as url:
        opened(tab, url)
        tab.evaluate(
            "(() => { globalThis.hits = 0; globalThis.hit = () => { hits += 1; };"
            f" const nasty = {json.dumps(nasty)}, made = newConversation(lastSettings());"
            " addTurn(made, -1, { role: 'user', text: nasty });"
            " addTurn(made, 0, { role: 'assistant', text: nasty, model: nasty, reasoning: nasty,"
            "   first: 1, last: 2, sent: 0, route: `prefill=${nasty}`, end: nasty, error: nasty,"
            "   calls: [{ id: nasty, name: nasty, arguments: nasty }] });"
            " addTurn(made, 1, { role: 'tool', results: [{ id: nasty, name: nasty, text: nasty }] });"
            " return chat.store.put(made).then(() => { location.hash = made.id; }); })()"
        )
        tab.wait("document.querySelectorAll('.turn').length === 3")
        tab.wait("document.querySelector('#list a')")
        assert tab.evaluate("document.querySelectorAll('img').length") == 0
        assert tab.evaluate("hits") == 0
        assert tab.evaluate("document.body.innerText").count(nasty) >= 9
        assert tab.complaints == []
