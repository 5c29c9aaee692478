"""A person sees that an answer's connection broke off, and afterwards that the answer went on."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

from tests.api_parts import Api, FakeCluster, says, served
from tests.browser import Page
from tests.router.page.chat_tab import BROKEN, ENDED, FACTS, SHOWN, ask, opened, said

ANSWER = "Air scatters blue light more than red, and the rest."


class AwayRouter:
    """An application that dies behind a few parts of its first stream, and answers no chat until it is `back`."""

    def __init__(self, api: Api, parts: int) -> None:
        self._app, self._journals, self._parts = api.app, api.journals, parts
        self._writing: asyncio.Task[None] | None = None
        self.back = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

        async def told(message: Message) -> None:
            if scope["type"] == "http" and "completions" in scope["path"] and not self.back:
                self._parts -= 1
                if self._parts <= 0:
                    raise ConnectionResetError("away")
            await send(message)

        await self._app(scope, receive, told)

    async def _write(self) -> None:
        async with self._journals.running():
            await asyncio.Event().wait()


def test_a_broken_connection_is_shown_until_the_answer_goes_on(tab: Page) -> None:
    cluster = FakeCluster(says(ANSWER), gap_s=0.02)
    with served(app := AwayRouter(Api(cluster), 5)) as url:
        opened(tab, url)
        ask(tab, "Why is the sky blue?")
        tab.wait(f"{SHOWN}.length")
        assert tab.evaluate(SHOWN) == BROKEN
        assert tab.evaluate("document.getElementById('told').textContent") == "The connection broke off. Reconnecting."
        assert tab.evaluate("document.getElementById('send').textContent") == "Stop"
        before = said(tab)[1]
        assert ANSWER.startswith(before)
        assert len(before) < len(ANSWER)
        app.back = True
        tab.wait(f"{ENDED} && document.querySelector('.facts li')")
        assert said(tab) == ["Why is the sky blue?", ANSWER]
        assert tab.evaluate(SHOWN) == []
        assert "1 reconnect" in tab.evaluate(FACTS)
    tab.complaints.clear()  # the browser logs the broken connection


def test_a_stopped_answer_reconnects_no_more(tab: Page) -> None:
    with served(AwayRouter(Api(FakeCluster(says(ANSWER), gap_s=0.02)), 5)) as url:
        opened(tab, url)
        ask(tab, "Why is the sky blue?")
        tab.wait(f"{SHOWN}.length")
        tab.press("Escape")
        tab.wait(ENDED)
        assert tab.evaluate(SHOWN) == []
        assert "you ended it" in tab.evaluate(FACTS)
    tab.complaints.clear()
