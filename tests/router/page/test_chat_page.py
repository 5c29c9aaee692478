"""The chat page as a person uses it, in headless Chromium, over an API that answers from a script."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.types import Message, Receive, Scope, Send

from kvferry.protocol.errors import Overloaded
from tests.api_parts import Api, FakeCluster, says, served
from tests.browser import Page
from tests.router.page.chat_tab import ENDED, FACTS, MODEL, answers, ask, asked, opened, press_button, said

ANSWER = "Air scatters <b>blue</b> light\nmore than red & the rest."


def test_an_answer_is_streamed_and_accounted_for(tab: Page, tmp_path: Path) -> None:
    cluster = FakeCluster(says(ANSWER), gap_s=0.01, cached=8)
    with served(Api(cluster).app) as url:
        opened(tab, url)
        assert tab.evaluate("document.getElementById('model').value") == MODEL
        asked(tab, "Why is the sky blue?")
        assert said(tab) == ["Why is the sky blue?", ANSWER]
        facts = tab.evaluate(FACTS)
        assert facts[0] == "p0 → d0"
        assert facts[1].startswith("8 of ")
        assert "tokens/s" in facts[2]
        assert facts[3].endswith("ms TTFT")
        assert "Answer complete. Air scatters" in tab.evaluate("document.getElementById('told').textContent")
        asked(tab, "And at night?")
        first, second = (len(dispatch.spec.token_ids) for dispatch in cluster.dispatches)
        assert second > first + 20, "the conversation goes along"
        for scheme in ("light", "dark"):
            tab.screenshot(tmp_path / f"{scheme}.png", 900, 700, scheme)
            context = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (context == "rgb(22, 24, 27)") == (scheme == "dark"), context
        assert tab.complaints == []


def test_stop_ends_the_answer_and_the_work(tab: Page) -> None:
    cluster = FakeCluster(says("one two three " * 200), gap_s=0.02)
    with served(Api(cluster).app) as url:
        opened(tab, url)
        for count, stop in enumerate(("document.getElementById('send').click()", None)):
            ask(tab, "Count")
            tab.wait(f"document.querySelectorAll('.assistant .said')[{count}]?.textContent.length > 10")
            assert tab.evaluate("document.getElementById('send').textContent") == "Stop"
            if stop:
                tab.evaluate(stop)
            else:
                tab.press("Escape")
            tab.wait(ENDED)
            assert tab.evaluate(FACTS).count("you ended it") == count + 1
            for _ in range(200):
                if cluster.dispatches[count].cancelled.is_set():
                    break
                tab.wait("new Promise((resolve) => setTimeout(() => resolve(true), 20))")
            assert cluster.dispatches[count].cancelled.is_set()


def test_errors_are_shown_and_the_question_can_be_asked_again(tab: Page) -> None:
    cluster = FakeCluster(says("Hello!"))
    cluster.refusal = Overloaded("all nodes are full", retry_after=3)
    with served(Api(cluster).app) as url:
        opened(tab, url)
        ask(tab, "Hello")
        tab.wait("document.querySelector('.turn > .wrong:not([hidden])')")
        assert (
            tab.evaluate("document.querySelector('.turn > [role=alert]:not([hidden])').innerText")
            == "all nodes are full"
        )
        cluster.refusal = None
        press_button(tab, "Try again")
        tab.wait("document.querySelector('.facts li')")
        assert said(tab) == ["Hello", "Hello!"]
        assert "2 of 2" in tab.evaluate("document.querySelector('.assistant .tools').innerText")
    tab.complaints.clear()  # the browser logs a 429 as an error


def test_a_question_without_an_answer_is_not_sent_along(tab: Page) -> None:
    cluster = FakeCluster(says("Yes."))
    cluster.refusal = Overloaded("all nodes are full", retry_after=3)
    with served(Api(cluster).app) as url:
        opened(tab, url)
        asked(tab, "Hello")
        cluster.refusal = None
        ask(tab, "Are you there?")
        tab.wait("document.querySelector('.facts li')")
        assert said(tab) == ["Are you there?", "Yes."]
        assert "2 of 2" in tab.evaluate("document.querySelector('.user .tools').innerText")
    tab.complaints.clear()


def test_a_key_is_asked_for_and_kept(tab: Page) -> None:
    with served(Api(FakeCluster(says("Yes.")), api_key="secret").app) as url:
        tab.go(f"{url}/")
        tab.wait("document.activeElement.id === 'key'")
        tab.wait("document.getElementById('trouble').textContent.includes('API key')")
        tab.type("secret")
        tab.press("Enter")
        tab.wait("document.getElementById('model').value !== ''")
        assert tab.evaluate("document.getElementById('trouble').textContent") == ""
        asked(tab, "Is it open?")
        assert said(tab)[-1] == "Yes."
    tab.complaints.clear()  # the browser logs a 401 as an error


def test_another_answer_and_an_edited_question_leave_the_earlier_ones_in_reach(tab: Page) -> None:
    with served(Api(cluster := FakeCluster(answers("First.", "Second.", "Third.", "Fourth."))).app) as url:
        opened(tab, url)
        asked(tab, "One?")
        asked(tab, "Two?")
        press_button(tab, "Regenerate this answer")
        tab.wait(f"{ENDED} && document.body.innerText.includes('Third.')")
        assert said(tab) == ["One?", "First.", "Two?", "Third."]
        press_button(tab, "Earlier version of this answer")
        assert said(tab) == ["One?", "First.", "Two?", "Second."]
        press_button(tab, "Edit this question", number=0)
        assert tab.evaluate("document.activeElement.value") == "One?"
        tab.evaluate("document.activeElement.select()")
        tab.type("Uno?")
        tab.press("Enter")
        tab.wait(f"{ENDED} && document.body.innerText.includes('Fourth.')")
        assert said(tab) == ["Uno?", "Fourth."]
        assert len(cluster.dispatches[3].spec.token_ids) <= len(cluster.dispatches[0].spec.token_ids) + 2
        press_button(tab, "Earlier version of this question")
        assert said(tab) == ["One?", "First.", "Two?", "Third."], "the latest path behind it"
        assert tab.complaints == []


class BreakingOnce:
    """An application whose first stream breaks off behind a few parts, or falls silent; its journals are written."""

    def __init__(self, api: Api, parts: int, *, silent: bool = False) -> None:
        self._app, self._journals, self._parts, self._silent = api.app, api.journals, parts, silent
        self._writing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        breaks = scope["type"] == "http" and scope["method"] == "POST" and self._parts > 0

        async def told(message: Message) -> None:
            if breaks and message["type"] == "http.response.body":
                self._parts -= 1
                if self._parts <= 0 and self._silent:
                    await asyncio.Event().wait()
                if self._parts <= 0:  # nor does a word of the error get through
                    raise ConnectionResetError("broken off")
            await send(message)

        await self._app(scope, receive, told)

    async def _write(self) -> None:
        async with self._journals.running():
            await asyncio.Event().wait()


def test_an_answer_that_breaks_off_is_taken_up_again(tab: Page) -> None:
    cluster = FakeCluster(says(ANSWER), gap_s=0.01)
    with served(BreakingOnce(Api(cluster), 5)) as url:
        opened(tab, url)
        asked(tab, "Why is the sky blue?")
        assert said(tab) == ["Why is the sky blue?", ANSWER]
        assert tab.evaluate("document.querySelector('.turn > .wrong:not([hidden])')") is None
        assert len(cluster.dispatches) == 2
        assert cluster.dispatches[1].spec.delivered is not None
    tab.complaints.clear()  # the browser logs the broken connection


def test_an_answer_that_falls_silent_is_taken_up_again(tab: Page) -> None:
    """As behind a proxy that holds the connection of a router that froze."""
    cluster = FakeCluster(says(ANSWER), gap_s=0.01)
    with served(BreakingOnce(Api(cluster), 5, silent=True)) as url:
        opened(tab, url)
        asked(tab, "Why is the sky blue?")
        assert said(tab) == ["Why is the sky blue?", ANSWER]
        assert len(cluster.dispatches) == 2
    tab.complaints.clear()


def test_a_request_that_breaks_before_its_answer_is_sent_again(tab: Page) -> None:
    cluster = FakeCluster(says(ANSWER), gap_s=0.01)
    with served(BreakingOnce(Api(cluster), 1)) as url:
        opened(tab, url)
        asked(tab, "Why is the sky blue?")
        assert said(tab) == ["Why is the sky blue?", ANSWER]
        assert tab.evaluate("document.querySelector('.turn > .wrong:not([hidden])')") is None
    tab.complaints.clear()


def test_an_answer_goes_on_when_the_page_is_loaded_again(tab: Page) -> None:
    text = " ".join(map(str, range(45)))
    cluster = FakeCluster(says(text), gap_s=0.05)
    with served(BreakingOnce(Api(cluster), 0)) as url:
        opened(tab, url)
        ask(tab, "Count")
        tab.wait(
            "(async () => (await chat.store.all())[0]?.turns[1]?.pending && chat.current.turns[1].text.length > 30)()"
        )
        before = tab.evaluate("chat.current.turns[1].text.length")
        tab.reload()
        tab.wait("document.querySelector('.assistant .said')?.innerText.length > 10")
        tab.wait("document.getElementById('send').textContent === 'Stop'")
        tab.wait(f"{ENDED} && document.querySelector('.facts li')")
        assert said(tab) == ["Count", text]
        assert before < len(text)
    tab.complaints.clear()


def test_nothing_turns_text_into_markup(tab: Page) -> None:
    with served(Api(FakeCluster(says("x"))).app) as url:
        opened(tab, url)
        assert (
            tab.evaluate("(() => { try { document.body.innerHTML = 'x'; } catch (e) { return e.name; } })()")
            == "TypeError"
        )
    tab.complaints.clear()  # the browser logs what the policy refused
