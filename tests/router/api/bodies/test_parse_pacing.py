"""Long bodies take a small part of the event loop's time together, and no one waits for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from kvferry.protocol.errors import Cancelled, Overloaded
from kvferry.router.api.bodies import parse_pacing
from kvferry.router.api.bodies.parse_pacing import (
    COUNT_BYTES,
    CREDIT_S,
    LONG_S,
    MANY,
    MAX_OBJECTS,
    MAX_SHARED_WAIT_S,
    MAX_VALUES,
    MAX_WAIT_S,
    PARSING_SHARE,
    ParsePacing,
    cost_s,
    counted,
    measured_s,
)
from kvferry.router.api.bodies.reader import BodyReader
from kvferry.router.request_context import CALL, RequestContext
from tests.crowded import in_time
from tests.waiting import until


async def test_what_a_body_costs() -> None:
    assert await measured_s(b"a" * 2**16) < LONG_S, "a prompt of some ten thousand words is not long"
    assert await measured_s(b"1," * 2**15) < LONG_S, "nor is one of as many token ids"
    assert await measured_s(b"{},[" * 10**5) > LONG_S
    assert await measured_s(b"a" * 2**24) > LONG_S


@pytest.mark.parametrize("marks", [0, 1, MANY - 1, MANY, MANY + 1, 5000])
async def test_marks_are_counted_however_many_a_slice_has(marks: int) -> None:
    slices = b"x" * COUNT_BYTES, (b"a," * marks).ljust(COUNT_BYTES), b"{[" * 9 + b"x" * COUNT_BYTES + b","
    assert await counted(b"".join(slices)) == (marks + 1, 9, 9)


async def test_short_ones_never_wait_and_long_ones_share() -> None:
    pace, began = ParsePacing(), time.monotonic()
    await pace.turn(CREDIT_S)
    await pace.turn(CREDIT_S / 20)
    assert in_time(time.monotonic() - began, 1)
    began = time.monotonic()
    await asyncio.gather(*(pace.turn(LONG_S) for _ in range(4)), *(pace.turn(LONG_S / 2) for _ in range(999)))
    assert time.monotonic() - began > 3 * LONG_S / PARSING_SHARE


async def test_what_would_wait_too_long_is_told_to_come_back() -> None:
    pace = ParsePacing()
    await pace.turn(CREDIT_S + (MAX_WAIT_S + 1) * PARSING_SHARE)
    began = time.monotonic()
    with pytest.raises(Overloaded) as caught:
        await pace.turn(LONG_S)
    assert in_time(time.monotonic() - began, 1)
    assert caught.value.retry_after
    await pace.turn(LONG_S / 2)


async def test_one_source_does_not_push_out_others() -> None:
    """Its many long bodies wait for each other; the first of another source is next, and neither is sent away."""
    pace, order = ParsePacing(), list[str]()

    async def one(name: str, cost: float) -> None:
        await pace.turn(cost, name[:1])
        order.append(name)

    await pace.turn(CREDIT_S + LONG_S, "a")
    asked = [asyncio.create_task(one(f"a{number}", LONG_S)) for number in range(4)]
    left = asyncio.create_task(one("b-left", LONG_S))
    await asyncio.sleep(0)
    beyond = MAX_WAIT_S * PARSING_SHARE
    asked.append(asyncio.create_task(one("b", LONG_S)))
    asked.append(asyncio.create_task(one("a-huge", beyond)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await pace.turn(LONG_S, "a")
    asked.append(asyncio.create_task(one("c", LONG_S)))
    left.cancel()
    await asyncio.gather(*asked)
    assert order == ["a0", "b", "c", "a1", "a2", "a3", "a-huge"]
    await asyncio.wait_for(pace.turn(LONG_S / 2, "a"), 5)


@pytest.mark.parametrize("body", [b"," * 2**24, b'"' + b"{" * 2**24 + b'"'])
async def test_no_body_makes_others_wait_for_marks_that_are_not_parsed(body: bytes) -> None:
    """Braces in a string are no objects, and a body of too many values is refused; neither turns others away."""
    pace = ParsePacing()
    await pace.turn(CREDIT_S, "a")
    await pace.turn(await measured_s(body), "a")
    other = asyncio.create_task(pace.turn(LONG_S, "b"))
    await asyncio.sleep(0)
    assert not other.done() or other.exception() is None
    other.cancel()


async def test_one_that_leaves_as_its_turn_comes_holds_up_no_other() -> None:
    pace, loop = ParsePacing(), asyncio.get_running_loop()
    await pace.turn(CREDIT_S + LONG_S, "a")
    leaves, stays = (asyncio.create_task(pace.turn(LONG_S, name)) for name in "bc")
    await asyncio.sleep(0)
    loop.call_later(LONG_S / PARSING_SHARE / 2, leaves.cancel)
    time.sleep(2 * LONG_S / PARSING_SHARE)  # noqa: ASYNC251 - both timers become due in one turn of the loop
    await asyncio.wait_for(stays, 20)
    assert leaves.cancelled()


async def test_many_sources_make_no_wait_long() -> None:
    """Each has one body, which alone would wait for nobody: most are told at once when to come back."""
    pace, began = ParsePacing(), time.monotonic()
    await pace.turn(CREDIT_S, "first")
    cost = MAX_SHARED_WAIT_S * PARSING_SHARE / 10
    waiting = [asyncio.create_task(pace.turn(cost, f"s{number}")) for number in range(40)]
    await asyncio.sleep(0.01)
    refused = [each.exception() for each in waiting if each.done() and not each.cancelled() and each.exception()]
    assert len(refused) > 25
    assert in_time(time.monotonic() - began, 2)
    for error in refused:
        assert isinstance(error, Overloaded)
        assert error.status == 429
        assert 1 <= (error.retry_after or 0) <= 1 + MAX_SHARED_WAIT_S / 10 + 0.1
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not pace._waiting


async def test_sources_with_the_largest_bodies_do_not_shut_out_new_ones() -> None:
    """Five of them wait for half a minute together; a small body of a sixth source is next."""
    pace, order = ParsePacing(), list[str]()
    largest = cost_s(16 * 2**20, MAX_VALUES, MAX_OBJECTS)

    async def one(name: str, cost: float) -> None:
        await pace.turn(cost, name)
        order.append(name)

    await pace.turn(CREDIT_S + LONG_S, "first")
    asked = [asyncio.create_task(one(f"large{number}", largest)) for number in range(5)]
    await asyncio.sleep(0)
    small = asyncio.create_task(one("small", LONG_S))
    await asyncio.wait_for(small, 20)
    assert order[0] == "small", "a busy machine may have let the next one in as well"
    with pytest.raises(Overloaded):
        await pace.turn(largest, "sixth large one")
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert not pace._waiting
    assert not pace._started


async def test_small_bodies_of_new_sources_do_not_starve_a_large_one() -> None:
    """Each takes its cost from the lead that it has over the large body."""
    pace, order = ParsePacing(), list[str]()

    async def one(name: str, cost: float) -> None:
        await pace.turn(cost, name)
        order.append(name)

    await pace.turn(CREDIT_S + LONG_S, "first")
    large = asyncio.create_task(one("large", 3.5 * LONG_S))
    await asyncio.sleep(0)
    for number in range(20):
        await asyncio.wait_for(one(f"s{number}", LONG_S), 20)
        if large.done():
            break
    assert order.index("large") <= 5
    await large


async def test_a_large_body_goes_in_its_turn_however_many_new_sources_come() -> None:
    """50 small ones a second, each of a new source, take all that is shared: a large one was refused after 30 s."""
    pace, order, number = ParsePacing(), list[str](), 0

    async def one(name: str, cost: float) -> None:
        await pace.turn(cost, name)
        order.append(name)

    await pace.turn(CREDIT_S + LONG_S, "first")
    tasks = [asyncio.create_task(one("large", 30 * LONG_S))]
    await asyncio.sleep(0)
    while not tasks[0].done() and number < 20:
        for _ in range(2):
            tasks.append(asyncio.create_task(one(f"s{number}", LONG_S)))
            number += 1
        served = len(order)
        await until(lambda served=served: len(order) > served)  # type: ignore[misc]
    assert order.index("large") <= 2
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not pace._waiting


async def test_one_that_others_overtake_is_told_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second body of a source waits for new sources: no longer than any body may."""
    monkeypatch.setattr(parse_pacing, "MAX_SHARED_WAIT_S", 0.3)
    pace = ParsePacing()
    await pace.turn(CREDIT_S, "first")
    began = time.monotonic()
    pace._free_at += 0.25
    waits = asyncio.create_task(pace.turn(LONG_S, "a"))
    await asyncio.sleep(0)
    pace._free_at += 60
    assert pace._timer is not None
    pace._timer.cancel()
    with pytest.raises(Overloaded) as caught:
        await waits
    assert time.monotonic() - began > 0.25
    assert in_time(time.monotonic() - began, 2)
    assert (caught.value.retry_after or 0) > 59
    assert not pace._waiting


async def test_a_body_whose_client_leaves_does_not_wait_for_its_turn() -> None:
    reader, leaves, parts = BodyReader(2**20), asyncio.Event(), [b"[" + b"1," * 2**17 + b"1]"]
    scope = {"headers": (), CALL: RequestContext("a", 0.0, 0.0, "tenant")}

    async def receive() -> dict[str, object]:
        if parts:
            return {"type": "http.request", "body": parts.pop()}
        await leaves.wait()
        return {"type": "http.disconnect"}

    await reader._pace.turn(CREDIT_S + (MAX_WAIT_S - 1) * PARSING_SHARE)
    taking = asyncio.create_task(reader.take(scope, receive))
    await until(lambda: reader._pace._waiting)
    leaves.set()
    with pytest.raises(Cancelled):
        await asyncio.wait_for(taking, MAX_WAIT_S / 2)
    assert not reader._held
    assert not reader._pace._waiting


def fastest_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of five runs."""
    found = list[float]()
    for _ in range(5):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return min(found)


async def test_counts_are_exact() -> None:
    for data in (b"", b",", b"a" * COUNT_BYTES + b",{", b",[" * COUNT_BYTES, (b"a" * 999 + b'{"a":[1,2]}') * 3000):
        assert await counted(data) == (data.count(b","), data.count(b"{"), data.count(b"["))


@pytest.mark.usefixtures("unpaced")
def test_counting_all_marks_at_once_is_faster_than_each_mark() -> None:
    data = b"iVBORw0KGgo+" * 2**20

    def ours() -> None:
        work = counted(data)
        with suppress(StopIteration):
            while True:
                work.send(None)

    assert fastest_s(ours) < fastest_s(lambda: [data.count(mark) for mark in b",{["])
