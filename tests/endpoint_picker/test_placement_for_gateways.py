"""Where a picker sends requests: to the holder of a prefix, within the subset, away from load and from failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.lease import Load
from tests.api_parts import demo_text
from tests.endpoint_picker.gateway import TEXT, Answered, House, at, chat, completion, engine
from tests.fake_workers import BLOCK
from tests.waiting import until

ONE, TWO, THREE = "e1", "e2", "e3"


def chat_ids(content: str) -> list[int]:
    text = demo_text()
    return text.encode(text.render([{"role": "user", "content": content}]), add_special_tokens=False)


async def ended(*answers: Answered) -> None:
    for each in answers:
        await each.stream.respond()


@pytest.mark.parametrize("holder", [ONE, TWO, THREE])
async def test_a_chat_goes_where_its_prefix_is(holder: str) -> None:
    async with House(engine(ONE), engine(TWO), engine(THREE)) as house:
        await house.hold(holder, chat_ids(TEXT))
        for _ in range(3):
            answer = await house.ask(chat())
            assert answer.endpoints == answer.metadata == [at(holder)]
            assert answer.clears_route
            await ended(answer)


@pytest.mark.parametrize("holder", [ONE, TWO])
async def test_a_completion_goes_where_its_prefix_is(holder: str) -> None:
    """As text, as token ids, and as the first of several prompts."""
    ids = demo_text().encode(TEXT)
    async with House(engine(ONE), engine(TWO)) as house:
        await house.hold(holder, ids)
        for prompt in (TEXT, ids, [TEXT, "more"], [ids, [1, 2, 3]]):
            assert await house.complete(completion(prompt), "/v1/completions") == at(holder)


async def test_a_cache_salt_is_looked_up_as_the_engine_keeps_it() -> None:
    async with House(engine(ONE), engine(TWO)) as house:
        await house.hold(ONE, chat_ids(TEXT))
        await house.hold(TWO, chat_ids(TEXT), "salted")
        for _ in range(2):
            assert await house.complete(chat()) == at(ONE)
            assert await house.complete(chat(cache_salt="salted")) == at(TWO)


async def test_what_a_silent_engine_was_sent_is_remembered() -> None:
    """One that reports no blocks, as llama.cpp: the next requests go to the engine that served the first one."""
    async with House(engine(ONE, events=False), engine(TWO, events=False), engine(THREE, events=False)) as house:
        first = await house.complete(chat())
        assert [await house.complete(chat()) for _ in range(6)] == [first] * 6


async def test_of_an_engine_that_reports_its_blocks_nothing_is_remembered() -> None:
    """It may have evicted them: equal engines take turns."""
    async with House(engine(ONE), engine(TWO)) as house:
        assert {await house.complete(chat()) for _ in range(4)} == {at(ONE), at(TWO)}


async def test_an_answer_that_is_an_error_is_not_remembered() -> None:
    async with House(engine(ONE, events=False), engine(TWO, events=False)) as house:
        seen = set()
        for _ in range(4):
            answer = await house.ask(chat())
            await answer.stream.respond(status=400)
            seen.add(answer.endpoints[0])
        assert len(seen) == 2


async def test_requests_with_a_prefix_that_is_computed_now_follow_it() -> None:
    """The index lists it only later."""
    async with House(engine(ONE), engine(TWO), engine(THREE)) as house:
        answers = [await house.ask(chat()) for _ in range(3)]
        assert len({answer.endpoints[0] for answer in answers}) == 1
        await ended(*answers)


async def test_load_spreads_and_counts_until_the_response_ends() -> None:
    async with House(engine(ONE), engine(TWO)) as house:
        answers = [await house.ask(chat(f"{n} {TEXT}")) for n in range(8)]
        assert sorted(house.bookings().values()) == [4, 4]
        for answer in answers:
            await answer.stream.begin()
        assert sum(house.bookings().values()) == 8
        for answer in answers[:3]:
            await answer.stream.call.done_writing()
        await until(lambda: sum(house.bookings().values()) == 5)
        for answer in answers[3:]:
            await answer.stream.call.done_writing()


async def test_a_loaded_engine_is_avoided() -> None:
    busy = Load(waiting_requests=40, waiting_tokens=90_000, free_blocks=1000, total_blocks=1000)
    async with House(engine(ONE, load=busy), engine(TWO)) as house:
        assert [await house.complete(chat(f"{n} {TEXT}")) for n in range(4)] == [at(TWO)] * 4


SUBSETS: list[Any] = [
    [at(TWO)],
    at(TWO),
    f"10.0.0.99:8000, {at(TWO)}",
    ["10.0.0.2"],
    "10.0.0.2",
    [f"9.9.9.9:1,{at(TWO)}"],
]


@pytest.mark.parametrize("subset", SUBSETS, ids=str)
async def test_the_subset_is_obeyed_against_the_prefix(subset: Any) -> None:
    async with House(engine(ONE), engine(TWO), fallback_endpoints=4) as house:
        await house.hold(ONE, chat_ids(TEXT))
        answer = await house.ask(chat(), subset=subset)
        assert answer.endpoints == [at(TWO)]
        await ended(answer)


@pytest.mark.parametrize("subset", [[], "", ["10.0.0.7:8000"], "10.0.0.1:9000"], ids=str)
async def test_a_subset_without_a_node_is_refused_at_once(subset: Any) -> None:
    async with House(engine(ONE), queue_timeout=60.0) as house:
        async with asyncio.timeout(5):
            answer = await house.ask(chat(), subset=subset)
        assert (answer.status, answer.error["code"]) == (503, "no_nodes")
        assert answer.headers["retry-after"] == "2"


async def test_fallbacks_are_named_behind_the_best() -> None:
    async with House(engine(ONE), engine(TWO), engine(THREE), fallback_endpoints=1) as house:
        await house.hold(TWO, chat_ids(TEXT))
        answer = await house.ask(chat())
        assert answer.endpoints[0] == at(TWO)
        assert len(answer.endpoints) == 2
        assert answer.endpoints == answer.metadata
        await ended(answer)


async def test_the_endpoint_that_served_has_the_request_and_its_prefix() -> None:
    """The gateway used the fallback: the booking moves, and what was sent is remembered there."""
    async with House(engine(ONE, events=False), engine(TWO, events=False), fallback_endpoints=1) as house:
        answer = await house.ask(chat())
        _, second = answer.endpoints
        await answer.stream.begin(served=second)
        assert house.bookings() == {node: int(at(node) == second) for node in (ONE, TWO)}
        await answer.stream.call.done_writing()
        await until(house.free)
        assert [await house.complete(chat()) for _ in range(3)] == [second] * 3


async def test_an_endpoint_that_keeps_failing_is_left() -> None:
    async with House(engine(ONE), engine(TWO)) as house:
        await house.hold(ONE, chat_ids(TEXT))
        for _ in range(3):
            answer = await house.ask(chat())
            await answer.stream.respond(status=503 if answer.endpoints == [at(ONE)] else 200)
        assert await house.complete(chat()) == at(TWO)


async def test_only_nodes_with_an_engine_s_address_take_requests() -> None:
    """Kvferry's own nodes, and engines at names that Envoy does not resolve, are left out."""
    own = engine(ONE, engine="", engine_url="")
    async with House(own, engine(TWO, engine_url="http://engine.example:8000"), engine(THREE)) as house:
        for node_id in (ONE, TWO):
            await house.hold(node_id, chat_ids(TEXT))
        assert [await house.complete(chat()) for _ in range(3)] == [at(THREE)] * 3


async def test_an_adapter_s_requests_go_to_its_holders() -> None:
    async with House(engine(ONE), engine(TWO, adapters=(AdapterName("x", "id-x"),))) as house:
        assert {await house.complete(chat(model="x")) for _ in range(4)} == {at(TWO)}


async def test_a_node_that_dies_takes_no_more_requests() -> None:
    async with House(engine(ONE), engine(TWO)) as house:
        await house.hold(ONE, chat_ids(TEXT))
        assert await house.complete(chat()) == at(ONE)
        house.workers[ONE].crash()
        await until(lambda: not house.nodes.entries[ONE, 1].reachable)
        assert await house.complete(chat()) == at(TWO)


async def test_ipv6_engines_have_brackets() -> None:
    async with House(engine(ONE, "[fd00::1]")) as house:
        assert await house.complete(chat(), subset=["[fd00::1]:8000"]) == "[fd00::1]:8000"
        assert await house.complete(chat(), subset=["fd00::1"]) == "[fd00::1]:8000"


async def test_engines_of_several_fingerprints_are_found_each_by_its_own_hashes() -> None:
    """As while engines are upgraded one by one: a prefix counts where it is, under the hashes of its own version."""
    async with House(engine(ONE, fingerprint="old"), engine(TWO, fingerprint="new")) as house:
        for holder, fingerprint in ((ONE, "old"), (TWO, "new")):
            ids = chat_ids(f"{fingerprint} {TEXT}")
            rows = rows_of(chain(root_hash(fingerprint), tuple(ids), BLOCK))
            await house.store.publish(holder, 1, rows, ())
            for _ in range(2):
                assert await house.complete(chat(f"{fingerprint} {TEXT}")) == at(holder)
