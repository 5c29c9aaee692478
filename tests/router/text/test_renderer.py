"""Prompts rendered in child processes: what takes all memory or time fails alone, and nobody waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from kvferry.protocol.errors import InvalidRequest, KvferryError, Overloaded
from kvferry.router.text.render_frames import longest_text, minimal_environment
from kvferry.router.text.render_slots import MAX_WAITING
from kvferry.router.text.renderer import Renderer
from kvferry.router.text.rendering import Rendering
from tests.hostile_templates import BOMBS, template_in_child
from tests.waiting import until

DEADLINE_S = 1.5
"""Deadline of a rendering in these tests, in seconds."""
RSS = 64 * 2**20
"""Most memory that a router may take for a rendering of a few bytes."""
GOOD = "{{ messages[0].content | list | join('.') }}"
SPIN = "{% for a in range(7000) %}{{ range(100000) | list | sum }}{% endfor %}"


@asynccontextmanager
async def renderer(source: str, deadline_s: float = DEADLINE_S) -> AsyncIterator[Renderer]:
    made = Renderer(template_in_child(source), deadline_s)
    try:
        yield made
    finally:
        await made.close()
        assert not made.children


def asked(content: str = "hi", **variables: object) -> Rendering:
    return Rendering("plain", {"messages": [{"role": "user", "content": content}], **variables})


async def longest_pause(until: asyncio.Task[None]) -> float:
    """Longest time for which the event loop did nothing else, in seconds."""
    longest, last = 0.0, time.monotonic()
    while not until.done():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


def peak_rss(*, anew: bool = False) -> int:
    """Return the most memory this process had; with `anew`, of now on."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def what_has(pid: int) -> tuple[set[str], set[str], str]:
    """Names of a process's variables, its descriptors, and the files that it maps."""
    place = Path(f"/proc/{pid}")
    variables = place.joinpath("environ").read_bytes().split(b"\0")
    names = {each.split(b"=")[0].decode() for each in variables if each}
    return names, {each.name for each in place.joinpath("fd").iterdir()}, place.joinpath("maps").read_text()


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_is_refused_in_time_and_the_router_keeps_its_memory(name: str) -> None:
    before = peak_rss(anew=True)
    async with renderer("{% if bomb %}" + BOMBS[name] + "{% endif %}fine") as made:
        assert await made.render(asked()) == "fine"
        began = time.monotonic()
        with pytest.raises(
            InvalidRequest, match=r"MiB of memory|more than 1\.5 s|bytes|refused the messages"
        ) as caught:
            await made.render(asked(bomb=True))
        assert time.monotonic() - began < DEADLINE_S + 1.5
        assert (caught.value.status, caught.value.param) == (400, "messages")
        assert await made.render(asked()) == "fine"
    assert peak_rss() - before < RSS


async def test_others_render_and_the_event_loop_turns_while_tenants_send_bombs() -> None:
    async with renderer("{% if bomb %}" + SPIN + "{% endif %}" + GOOD) as made:
        await asyncio.gather(made.render(asked(), "good"), made.render(asked(), "good"))
        bombs = [asyncio.create_task(made.render(asked(bomb=True), f"bad{each % 2}")) for each in range(6)]
        await asyncio.sleep(0.3)

        async def honest() -> list[float]:
            took = []
            for place in range(20):
                began = time.monotonic()
                assert await made.render(asked(f"{place:02}"), "good") == f"{place // 10}.{place % 10}"
                took.append(time.monotonic() - began)
                await asyncio.sleep(0.02)
            return took

        took = await honest()
        assert not any(bomb.done() and bomb.exception() is None for bomb in bombs)
        assert sorted(took)[-3] < DEADLINE_S / 2, took
        await made.close()
        ended = await asyncio.gather(*bombs, return_exceptions=True)
        assert all(isinstance(each, KvferryError) for each in ended)


async def test_the_event_loop_turns_while_a_bomb_is_rendered() -> None:
    async with renderer("{% if bomb %}" + BOMBS["printed in a loop"] + SPIN + "{% endif %}fine") as made:
        await made.render(asked())

        async def bomb() -> None:
            with pytest.raises(InvalidRequest):
                await made.render(asked(bomb=True))

        assert await longest_pause(asyncio.create_task(bomb())) < 0.5


async def test_a_third_slow_rendering_is_refused_while_two_run() -> None:
    async with renderer(SPIN) as made:
        slow = [asyncio.create_task(made.render(asked(), tenant)) for tenant in "abc"]
        ended = await asyncio.gather(*slow, return_exceptions=True)
        assert sorted(type(each).__name__ for each in ended) == ["InvalidRequest", "InvalidRequest", "Overloaded"]


async def test_a_process_that_is_killed_is_replaced() -> None:
    async with renderer(GOOD) as made:
        await made.render(asked())
        for pid in made.children:
            os.kill(pid, signal.SIGKILL)
        assert await made.render(asked()) == "h.i"


async def test_a_rendering_whose_process_is_killed_is_rendered_again() -> None:
    async with renderer("{% if bomb %}" + "{{ range(100000) | list | sum }}" * 300 + "{% endif %}fine", 20) as made:
        await made.render(asked())
        (pid,) = made.children
        rendering = asyncio.create_task(made.render(asked(bomb=True)))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        assert (await rendering).endswith("fine")


async def test_too_many_waiting_prompts_of_a_tenant_are_refused_with_429() -> None:
    async with renderer(SPIN) as made:
        waiting = [asyncio.create_task(made.render(asked(), "bad")) for _ in range(MAX_WAITING + 3)]
        await asyncio.sleep(0)
        refused = [each for each in waiting if each.done()]
        assert refused
        assert all(isinstance(each.exception(), Overloaded) for each in refused)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_rendering_goes_on_without_its_client_and_its_process_serves_the_next() -> None:
    async with renderer(GOOD) as made:
        await made.render(asked())
        children = made.children
        leaver = asyncio.create_task(made.render(asked("gone" * 15_000)))
        await asyncio.sleep(0.01)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        assert await made.render(asked()) == "h.i"
        assert set(children) <= set(made.children)


async def test_a_text_that_grows_beyond_its_bound_is_refused() -> None:
    longest = longest_text(len(asked(count=0).frame))
    async with renderer("{% for a in range(count) %}{{ 'x' * 65536 }}{% endfor %}") as made:
        assert len(await made.render(asked(count=longest // 65536))) <= longest
        with pytest.raises(InvalidRequest, match=r"writes more than \d+ bytes"):
            await made.render(asked(count=longest // 65536 + 1))


async def test_a_long_prompt_in_any_script_is_rendered() -> None:
    long = "\U0001f600 é \ud800" + "x" * (16 * 2**20 - 20)
    async with renderer("<{{ messages[0].content }}>", 30) as made:
        assert await made.render(asked(long)) == f"<{long}>"


async def test_a_child_has_no_secrets_and_no_descriptors_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_API_KEY", "secret")
    read, write = os.pipe()
    os.set_inheritable(read, True)
    async with renderer(GOOD) as made:
        await made.render(asked())
        (pid,) = made.children
        names, descriptors, mapped = what_has(pid)
        assert names <= {*minimal_environment(), "LC_CTYPE"}
        assert "KVFERRY_API_KEY" not in names
        assert descriptors == {"0", "1", "2"}
        assert "/pydantic_core/" not in mapped
    os.close(read)
    os.close(write)


async def test_a_process_that_starts_at_the_end_is_ended_too() -> None:
    async with renderer(GOOD) as made:
        starting = asyncio.create_task(made.render(asked()))
        await until(lambda: bool(made.children), 5.0)
        await made.close()
        await asyncio.gather(starting, return_exceptions=True)
        assert not made.children


async def test_no_prompt_is_rendered_after_the_end() -> None:
    async with renderer(GOOD) as made:
        await made.render(asked())
    with pytest.raises(Overloaded, match="shutting down"):
        await made.render(asked())


def test_processes_start_and_end_on_the_event_loop_of_a_router() -> None:
    async def scenario() -> None:
        os.set_inheritable(write, True)
        async with renderer("{% if bomb %}" + SPIN + "{% endif %}" + GOOD) as made:
            assert await made.render(asked()) == "h.i"
            assert what_has(made.children[0])[1] == {"0", "1", "2"}
            assert await made.render(asked("x" * 2**20)) == ".".join("x" * 2**20)
            with pytest.raises(InvalidRequest, match=r"1\.5 s"):
                await made.render(asked(bomb=True))
            assert await made.render(asked()) == "h.i"

    read, write = os.pipe()
    uvloop.run(scenario())
    os.close(read)
    os.close(write)


def test_the_event_loop_of_a_large_router_turns_while_a_process_starts() -> None:
    """A fork of the router by the event loop would copy page tables meanwhile: 100 ms and more for this much memory."""
    memory = [bytearray(b"x" * 2**20) for _ in range(400)]

    async def scenario() -> list[float]:
        pauses = list[float]()
        for _ in range(5):
            async with renderer(GOOD) as made:
                rendering = asyncio.create_task(made.render(asked()))
                pauses.append(await longest_pause(asyncio.create_task(_ended(rendering))))
        return pauses

    assert min(uvloop.run(scenario())) < 0.06
    assert memory


async def _ended(task: asyncio.Task[str]) -> None:
    await task
