"""The chat page as a person uses it, in headless Chromium, over an API that answers from a script."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from kvferry.protocol.errors import Overloaded
from kvferry.router.page.page import chat_page
from tests.api_parts import Api, FakeCluster, says, served
from tests.browser import CHROMIUM, Page, browser

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
ANSWER = "Air scatters <b>blue</b> light\nmore than red & the rest."
FACTS = "[...document.querySelectorAll('.facts li')].map((item) => item.innerText)"
ENDED = "document.getElementById('send').textContent === 'Send' && !document.getElementById('hint')"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def ask(page: Page, question: str) -> None:
    page.evaluate("document.getElementById('ask').focus()")
    page.type(question)
    page.press("Enter")


def said(page: Page) -> list[str]:
    return list(page.evaluate("[...document.querySelectorAll('.said')].map((node) => node.textContent)"))


async def test_the_page_is_one_file_that_loads_nothing() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Api(FakeCluster(says("x")), api_key="k").app)) as http:
        response = await http.get("http://router/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    assert "http://" not in response.text
    assert "https://" not in response.text
    assert response.content == chat_page().body


@needs_browser
def test_an_answer_is_streamed_and_accounted_for(tab: Page, tmp_path: Path) -> None:
    cluster = FakeCluster(says(ANSWER), gap_s=0.01, cached=8)
    with served(Api(cluster).app) as url:
        tab.go(f"{url}/")
        tab.wait("document.getElementById('model').value === 'SmolLM2-135M-Instruct'")
        ask(tab, "Why is the sky blue?")
        tab.wait(ENDED)
        assert said(tab) == ["Why is the sky blue?", ANSWER]
        facts = tab.evaluate(FACTS)
        assert facts[0] == "p0 → d0 computed it"
        assert facts[1].startswith("8 of ")
        assert "tokens/s" in facts[2]
        ask(tab, "And at night?")
        tab.wait("document.querySelectorAll('.facts').length === 2")
        first, second = (len(dispatch.spec.token_ids) for dispatch in cluster.dispatches)
        assert second > first + 20, "the conversation goes along"
        for scheme in ("light", "dark"):
            tab.screenshot(tmp_path / f"{scheme}.png", 900, 700, scheme)
            context = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (context == "rgb(22, 24, 27)") == (scheme == "dark"), context
        assert tab.complaints == []


@needs_browser
def test_stop_ends_the_answer_and_the_work(tab: Page) -> None:
    cluster = FakeCluster(says("one two three " * 200), gap_s=0.02)
    with served(Api(cluster).app) as url:
        tab.go(f"{url}/")
        ask(tab, "Count")
        tab.wait("document.querySelector('.assistant .said')?.textContent.length > 10")
        assert tab.evaluate("document.getElementById('send').textContent") == "Stop"
        tab.evaluate("document.getElementById('send').click()")
        tab.wait(ENDED)
        assert "you ended it" in tab.evaluate(FACTS)
        (dispatch,) = cluster.dispatches
        for _ in range(200):
            if dispatch.cancelled.is_set():
                break
            tab.wait("new Promise((resolve) => setTimeout(() => resolve(true), 20))")
        assert dispatch.cancelled.is_set()


@needs_browser
def test_errors_are_shown_and_the_question_comes_back(tab: Page) -> None:
    cluster = FakeCluster(says("x"))
    cluster.refusal = Overloaded("all nodes are full", retry_after=3)
    with served(Api(cluster).app) as url:
        tab.go(f"{url}/")
        ask(tab, "Hello")
        tab.wait("document.querySelector('[role=alert]')")
        assert tab.evaluate("document.querySelector('[role=alert]').textContent") == "all nodes are full"
        assert tab.evaluate("document.getElementById('ask').value") == "Hello"
    tab.complaints.clear()  # the browser logs a 429 as an error


@needs_browser
def test_a_key_is_asked_for_and_kept(tab: Page) -> None:
    with served(Api(FakeCluster(says("Yes.")), api_key="secret").app) as url:
        tab.go(f"{url}/")
        tab.wait("document.activeElement.id === 'key'")
        tab.wait("document.querySelector('[role=alert]')")
        assert "API key" in tab.evaluate("document.querySelector('[role=alert]').textContent")
        tab.type("secret")
        tab.press("Tab")
        tab.wait("document.getElementById('model').value !== ''")
        ask(tab, "Is it open?")
        tab.wait(ENDED)
        assert said(tab)[-1] == "Yes."
    tab.complaints.clear()  # the browser logs a 401 as an error


@needs_browser
def test_everything_has_a_name_for_those_who_cannot_see_it(tab: Page) -> None:
    with served(Api(FakeCluster(says("Yes."))).app) as url:
        tab.go(f"{url}/")
        tab.evaluate("document.getElementById('more').open = true")
        names = tab.names()
    for role in ("textbox", "button", "combobox", "spinbutton"):
        assert names[role]
        assert all(names[role]), (role, names[role])
    assert "Message" in names["textbox"]
    if where := os.environ.get("KEEP_SCREENSHOT"):
        tab.screenshot(Path(where), 900, 700)


class BreakingOnce:
    """An application whose first stream breaks off behind a few parts; its journals are written."""

    def __init__(self, api: Api, parts: int) -> None:
        self._app, self._journals, self._parts = api.app, api.journals, parts
        self._writing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        breaks = scope["type"] == "http" and scope["method"] == "POST" and self._parts > 0

        async def told(message: Message) -> None:
            if breaks and message["type"] == "http.response.body":
                self._parts -= 1
                if self._parts == 0:
                    raise ConnectionResetError("broken off")
            await send(message)

        await self._app(scope, receive, told)

    async def _write(self) -> None:
        async with self._journals.kept():
            await asyncio.Event().wait()


@needs_browser
def test_an_answer_that_breaks_off_is_taken_up_again(tab: Page) -> None:
    cluster = FakeCluster(says(ANSWER), gap_s=0.01)
    with served(BreakingOnce(Api(cluster), 5)) as url:
        tab.go(f"{url}/")
        ask(tab, "Why is the sky blue?")
        tab.wait(ENDED)
        assert said(tab) == ["Why is the sky blue?", ANSWER]
        assert tab.evaluate("document.querySelector('[role=alert]')") is None
        assert len(cluster.dispatches) == 2
        assert cluster.dispatches[1].spec.delivered is not None
    tab.complaints.clear()  # the browser logs the broken connection
