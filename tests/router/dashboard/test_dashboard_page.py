"""The dashboard as a person sees it, in headless Chromium, over states from a list."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router.dashboard.page import view
from tests.api_parts import Api, FakeCluster, app_of, demo_text, says, served
from tests.browser import CHROMIUM, Page, browser
from tests.dashboard_states import NASTY, ScriptedBoard, busy, hostile

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
WIDER = "document.documentElement.scrollWidth > innerWidth"


@contextmanager
def page_of(board: ScriptedBoard, **settings: Any) -> Iterator[str]:
    app = app_of(FakeCluster(says("x")), demo_text(), RouterMetrics(), RouterSettings(**settings), board=board)  # type: ignore[arg-type]
    with served(app) as url:
        yield f"{url}/dashboard"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def text(page: Page) -> str:
    return str(page.evaluate("document.getElementById('view').innerText"))


async def test_the_page_loads_nothing_and_its_policy_allows_no_more() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Api(FakeCluster(says("x"))).app)) as http:
        response = await http.get("http://router/dashboard")
    policy = response.headers["content-security-policy"]
    assert response.status_code == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http://" not in response.text
    assert "https://" not in response.text
    assert " style=" not in response.text, "the policy would take it away"
    assert "Nothing happened yet." in response.text, "it shows something without a script"


def test_nobody_who_names_things_writes_the_page() -> None:
    html = view(hostile())
    assert "<img" not in html
    assert html.count("&lt;img src=x") > 15


@needs_browser
def test_what_is_shown_follows_the_router(tab: Page, tmp_path: Path) -> None:
    board = ScriptedBoard(busy())
    with page_of(board) as url:
        tab.go(url)
        first = text(tab)
        for shown in (
            "decode-2",
            "suspected",
            "61 MB/s",
            "another decode",
            "chat-0008",
            "evicted",
            "1 h 23 m",
            "team-a",
        ):
            assert shown in first, shown
        board.shows = busy(router="router-restarted", running=[], running_total=0)
        tab.wait("document.getElementById('view').innerText.includes('router-restarted')")
        assert "No request is in flight." in text(tab)
        assert tab.evaluate("document.querySelectorAll('svg.pool rect').length") == 5 * 4
        for scheme in ("light", "dark"):
            tab.screenshot(tmp_path / f"{scheme}.png", 1300, 900, scheme)
            context = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (context == "rgb(22, 24, 27)") == (scheme == "dark"), context
            assert not tab.evaluate(WIDER)
        tab.screenshot(tmp_path / "narrow.png", 380, 900)
        assert not tab.evaluate(WIDER), "tables scroll by themselves, the page does not"
        assert tab.complaints == []


@needs_browser
def test_it_stands_still_while_it_is_paused_and_says_when_it_is_old(tab: Page) -> None:
    board = ScriptedBoard(busy())
    with page_of(board) as url:
        tab.go(url)
        tab.wait("!document.getElementById('pause').hidden")
        tab.evaluate("document.getElementById('pause').click()")
        looks = board.looks
        tab.wait("new Promise((done) => setTimeout(() => done(true), 2500))")
        assert board.looks <= looks + 1
        tab.evaluate("document.getElementById('pause').click()")
        tab.wait("true")
    tab.wait("document.getElementById('lost').textContent.startsWith('No answer for')")
    tab.go("about:blank")
    tab.complaints.clear()  # the browser logs what it could not fetch


@needs_browser
def test_a_key_is_asked_for(tab: Page) -> None:
    board = ScriptedBoard(busy())
    with page_of(board, api_key="secret") as url:
        tab.go(url)
        tab.wait("document.activeElement.id === 'key'")
        assert "decode-0" not in tab.evaluate("document.body.innerText")
        assert board.looks == 0
        tab.type("secret")
        tab.press("Tab")
        tab.wait("document.getElementById('view').innerText.includes('decode-0')")
        tab.go("about:blank")
    tab.complaints.clear()  # the browser logs a 401 as an error


@needs_browser
def test_hostile_names_are_text(tab: Page) -> None:
    with page_of(ScriptedBoard(hostile())) as url:
        tab.go(url)
        tab.wait("document.getElementById('view').innerText.includes('onerror')")
        assert tab.evaluate("document.querySelectorAll('img, #view script').length") == 0
        assert NASTY.split("\x1b")[0] in text(tab)
        assert not tab.evaluate(WIDER)
        assert tab.complaints == []


@needs_browser
def test_pictures_have_names_for_those_who_cannot_see_them(tab: Page) -> None:
    with page_of(ScriptedBoard(busy())) as url:
        tab.go(url)
        names = tab.names()
    assert all(names["image"] + names["button"])
    assert any("420 active" in name for name in names["image"])
    assert any("prefill-1 to decode-0 61 MB/s" in name for name in names["image"])
    if where := os.environ.get("KEEP_SCREENSHOT"):
        tab.screenshot(Path(where), 1280, 1500)
