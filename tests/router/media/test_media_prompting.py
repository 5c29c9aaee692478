"""Prompts of chats with media: who waits for whom, and what is counted meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvferry.protocol.errors import Overloaded
from kvferry.protocol.media import MediaItem, RenderRequest
from kvferry.router.dispatch.prompt_media import PromptMedia, RenderedMedia
from kvferry.router.media.chat import MediaChat
from kvferry.router.media.limits import LOADS_PER_TENANT, MAX_RENDERS
from kvferry.router.media.loading import MediaLoader
from kvferry.router.media.parts import media_parts
from kvferry.router.media.prompting import MediaPrompter
from kvferry.router.request_context import RequestContext
from tests.router.media import pictures as made
from tests.waiting import until

AWAY = "https://pictures.example/cat.png"
HERE = made.data_url(made.png(), made.PNG)


class Host:
    """Answers with a picture as soon as it may."""

    def __init__(self) -> None:
        self.may, self.asked = asyncio.Event(), 0

    def check(self, url: str, field: str) -> None:
        """Allow every URL."""

    async def fetch(self, url: str, field: str, tenant: str = "") -> tuple[bytes, str]:
        self.asked += 1
        await self.may.wait()
        return made.png(), made.PNG

    async def close(self) -> None:
        """Do nothing."""


class Nodes:
    """Make a prompt of everything."""

    def __init__(self) -> None:
        self.asked, self.may = list[RenderRequest](), asyncio.Event()
        self.may.set()

    def check(self, modalities: object, adapter: str = "") -> None:
        """Take every modality."""

    async def render(self, request: RenderRequest, needed: object) -> RenderedMedia:
        self.asked.append(request)
        await self.may.wait()
        return RenderedMedia((1, 2), PromptMedia((MediaItem("image", "hash", 0, 1, b"x"),), "fingerprint"))


def chat(url: str) -> MediaChat:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    return MediaChat(messages, media_parts(messages), {})


class Holder:
    """Keeps a request's media."""


class Prompting:
    """A prompter with a host that it fetches from; the holders of what it was asked."""

    def __init__(self) -> None:
        self.host, self.nodes, self.holders = Host(), Nodes(), list[Holder]()
        self.prompter = MediaPrompter(MediaLoader(self.host), self.nodes)  # type: ignore[arg-type]

    def ask(self, url: str, tenant: str) -> asyncio.Task[RenderedMedia]:
        self.holders.append(Holder())
        now = time.monotonic()
        call = RequestContext("id", tenant=tenant, arrival=now, deadline=now + 30)
        return asyncio.create_task(self.prompter.prompt(chat(url), call, "", self.holders[-1]))


async def test_who_waits_for_a_slow_host_keeps_no_place_from_others():
    own = Prompting()
    slow = [own.ask(AWAY, tenant) for tenant in ("one", "two") for _ in range(MAX_RENDERS)]
    await until(lambda: own.host.asked == 2 * min(MAX_RENDERS, LOADS_PER_TENANT))
    await asyncio.wait_for(own.ask(HERE, "three"), 10)
    await asyncio.wait_for(own.ask(HERE, "one"), 10)
    assert len(own.nodes.asked) == 2
    own.host.may.set()
    await asyncio.gather(*slow)
    assert len(own.nodes.asked) == 2 + len(slow)


async def test_requests_of_a_tenant_that_fetch_are_bounded():
    own = Prompting()
    slow = [own.ask(AWAY, "one") for _ in range(LOADS_PER_TENANT + 3)]
    await until(lambda: own.host.asked == LOADS_PER_TENANT)
    await asyncio.sleep(0.05)
    assert own.host.asked == LOADS_PER_TENANT
    own.host.may.set()
    await asyncio.gather(*slow)


async def test_what_was_fetched_is_counted_until_its_prompt_is_made(monkeypatch: pytest.MonkeyPatch):
    own = Prompting()
    own.host.may.set()
    own.nodes.may.clear()
    fetched = len(made.png())
    asked = own.ask(AWAY, "one")
    await until(lambda: own.nodes.asked)
    assert own.prompter.budget.held >= fetched
    own.nodes.may.set()
    await asked
    del asked
    own.holders.clear()
    await until(lambda: own.prompter.budget.held == 0)
    monkeypatch.setattr(own.prompter.budget, "_limit", fetched - 1)
    with pytest.raises(Overloaded):
        await own.ask(AWAY, "one")
    assert len(own.nodes.asked) == 1
