"""Conversations that the chat page keeps in the browser: over reloads, within bounds, deleted and exported."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.api_parts import Api, FakeCluster, says, served
from tests.browser import Page
from tests.router.page.chat_tab import (
    ENDED,
    answers,
    ask,
    asked,
    opened,
    press_button,
    said,
    set_fields,
    wait_for_titles,
)


def test_a_conversation_is_kept_over_a_reload(tab: Page) -> None:
    with served(Api(FakeCluster(answers("One.", "Two."))).app) as url:
        opened(tab, url)
        set_fields(tab, system="Be brief.", temperature="0.7")
        asked(tab, "First <i>question</i>?")
        tab.reload()
        tab.wait("document.querySelectorAll('.said').length === 2")
        assert said(tab) == ["First <i>question</i>?", "One."]
        wait_for_titles(tab, "First <i>question</i>?")
        assert tab.evaluate("[...document.querySelectorAll('.facts li')].length") > 2
        assert tab.evaluate("document.getElementById('settings-sum').textContent") == "system prompt · temperature 0.7"
        asked(tab, "Second?")
        assert said(tab)[2:] == ["Second?", "Two."]


def test_several_conversations_stay_apart(tab: Page) -> None:
    with served(Api(FakeCluster(answers("One.", "Two.", "Three."))).app) as url:
        opened(tab, url)
        asked(tab, "First?")
        press_button(tab, "New chat")
        tab.wait("!document.querySelector('.turn')")
        asked(tab, "Second?")
        wait_for_titles(tab, "Second?", "First?")
        assert tab.evaluate("document.querySelector('#list [aria-current]').textContent") == "Second?"
        tab.evaluate("document.querySelectorAll('#list a')[1].click()")
        tab.wait("document.body.innerText.includes('One.')")
        assert said(tab) == ["First?", "One."]
        asked(tab, "Third?")
        assert said(tab) == ["First?", "One.", "Third?", "Three."]
        wait_for_titles(tab, "First?", "Second?")
        tab.evaluate("history.back()")
        tab.wait("document.body.innerText.includes('Two.')")


def test_an_answer_goes_on_while_another_conversation_is_open(tab: Page) -> None:
    text = " ".join(map(str, range(30)))
    with served(Api(FakeCluster(answers(text, "Two."), gap_s=0.03)).app) as url:
        opened(tab, url)
        ask(tab, "First?")
        tab.wait("document.querySelector('.assistant .said')?.innerText.length > 5")
        press_button(tab, "New chat")
        tab.wait("document.getElementById('send').textContent === 'Send'")
        asked(tab, "Second?")
        assert said(tab) == ["Second?", "Two."]
        tab.wait("chat.running.size === 0")
        tab.evaluate("[...document.querySelectorAll('#list a')].find((node) => node.textContent === 'First?').click()")
        tab.wait(f"{ENDED} && document.body.innerText.includes('29')")
        assert said(tab) == ["First?", text]


def test_a_deleted_conversation_comes_back_until_the_line_is_gone(tab: Page) -> None:
    with served(Api(FakeCluster(answers("One.", "Two."))).app) as url:
        opened(tab, url)
        asked(tab, "First?")
        wait_for_titles(tab, "First?")
        press_button(tab, "Delete First?")
        tab.wait("!document.querySelector('.turn') && !document.querySelector('#list a')")
        tab.wait("document.getElementById('notice').innerText.includes('is deleted')")
        press_button(tab, "Undo")
        tab.wait("document.activeElement.textContent === 'First?'")
        tab.press("Enter")
        tab.wait("document.querySelectorAll('.said').length === 2")
        press_button(tab, "Delete all")
        wait_for_titles(tab, "First?")  # it asks once more
        press_button(tab, "Really delete all?")
        tab.wait("!document.querySelector('#list a') && !document.querySelector('.turn')")
        tab.reload()
        tab.wait("document.getElementById('empty').textContent.includes('this browser only')")


def test_an_answer_on_its_way_does_not_bring_a_deleted_conversation_back(tab: Page) -> None:
    with served(Api(FakeCluster(says("one two three " * 100), gap_s=0.02)).app) as url:
        opened(tab, url)
        ask(tab, "First?")
        tab.wait("document.querySelector('.assistant .said')?.innerText.length > 5")
        wait_for_titles(tab, "First?")
        press_button(tab, "Delete First?")
        tab.wait("chat.running.size === 0")
        tab.wait("!document.querySelector('#list a')")
        assert tab.evaluate("chat.store.heads()") == []


def test_the_oldest_conversations_go_first(tab: Page) -> None:
    with served(Api(FakeCluster(says("x"))).app) as url:
        opened(tab, url)
        kept = tab.evaluate(
            "(async () => { for (let n = 0; n < MAX_CONVERSATIONS + 5; n += 1) {"
            " const made = newConversation(lastSettings()); addTurn(made, -1, { role: 'user', text: `q${n}` });"
            " made.updated = n; await chat.store.put(made); }"
            " return (await chat.store.heads()).map((head) => head.title); })()"
        )
        assert len(kept) == 200
        assert (kept[0], kept[-1]) == ("q204", "q5")
        large = tab.evaluate(
            "(async () => { for (let n = 0; n < 3; n += 1) { const made = newConversation(lastSettings());"
            " addTurn(made, -1, { role: 'user', text: `large ${n}`, images: ['x'.repeat(30 * 2 ** 20)] });"
            " made.updated = 1000 + n; await chat.store.put(made); }"
            " return (await chat.store.heads()).map((head) => head.title); })()"
        )
        assert large[:2] == ["large 2", "large 1"]
        assert "large 0" not in large
        tab.evaluate("chat.removeAll()")


def test_a_browser_that_keeps_nothing_still_talks(tab: Page) -> None:
    blocked = tab.send(
        "Page.addScriptToEvaluateOnNewDocument",
        source="for (const name of ['indexedDB', 'localStorage', 'sessionStorage'])"
        " Object.defineProperty(window, name, { get() { throw new DOMException('no'); } })",
    )
    try:
        with served(Api(FakeCluster(answers("One.", "Two."))).app) as url:
            opened(tab, url)
            asked(tab, "First?")
            assert said(tab) == ["First?", "One."]
            assert "keeps no conversations" in tab.evaluate("document.getElementById('empty').textContent")
            wait_for_titles(tab, "First?")
            press_button(tab, "New chat")
            tab.wait("!document.querySelector('.turn')")
            tab.evaluate("document.querySelector('#list a').click()")
            tab.wait("document.body.innerText.includes('One.')")
    finally:
        tab.send("Page.removeScriptToEvaluateOnNewDocument", identifier=blocked["identifier"])
    assert tab.complaints == []


def test_exports_hold_what_was_said(tab: Page, tmp_path: Path) -> None:
    tab.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    with served(Api(FakeCluster(answers("One."))).app) as url:
        opened(tab, url)
        set_fields(tab, system="Be brief.")
        asked(tab, "First?")
        texts = {}
        for label, name in (("Export", "First.md"), ("Export all", "kvferry-conversations.json")):
            press_button(tab, label)
            until = time.monotonic() + 30
            while not (tmp_path / name).exists():
                assert time.monotonic() < until, list(tmp_path.iterdir())
                time.sleep(0.02)
            texts[label] = (tmp_path / name).read_text()
    said_there = "# First?\n\n## System\n\nBe brief.\n\n## You\n\nFirst?\n\n## SmolLM2-135M-Instruct\n\nOne.\n"
    assert texts["Export"] == said_there
    (kept,) = json.loads(texts["Export all"])
    assert [turn["text"] for turn in kept["turns"]] == ["First?", "One."]


def test_a_page_catches_up_with_another_tab(tab: Page) -> None:
    with served(Api(FakeCluster(answers("One.", "Two."))).app) as url:
        opened(tab, url)
        asked(tab, "First?")
        wait_for_titles(tab, "First?")
        tab.evaluate(
            "(async () => { const other = structuredClone(chat.current);"
            " addTurn(other, other.leaf, { role: 'user', text: 'From elsewhere?' }); other.updated += 1000;"
            " await chat.store.put(other); document.dispatchEvent(new Event('visibilitychange')); })()"
        )
        tab.wait("document.querySelectorAll('.turn').length === 3")
        assert said(tab) == ["First?", "One.", "From elsewhere?"]


def test_one_answer_at_a_time(tab: Page) -> None:
    with served(Api(FakeCluster(says("one two three " * 60), gap_s=0.02)).app) as url:
        opened(tab, url)
        ask(tab, "First?")
        tab.wait("document.querySelector('.assistant .said')?.innerText.length > 5")
        press_button(tab, "Edit this question")
        tab.type(" Or not?")
        tab.press("Enter")
        tab.wait("document.getElementById('notice').innerText.includes('on its way')")
        assert tab.evaluate("document.activeElement.value") == "First? Or not?", "nothing that was typed is lost"
        tab.wait("chat.running.size === 0")
        assert tab.evaluate("document.querySelector('.user footer').hidden"), "it is still edited"
        assert tab.evaluate("chat.current.turns.length") == 2
