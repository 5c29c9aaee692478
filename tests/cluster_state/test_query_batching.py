"""Questions that come together go in one call, and share nothing else."""

import asyncio
from collections.abc import Sequence

import pytest

from kvferry.cluster_state.query_batching import MAX_BYTES, Query, QueryBatcher
from kvferry.protocol.errors import RegistryFull, RegistryUnavailable


class Server:
    """Answers each question with its length, once it is let."""

    def __init__(self) -> None:
        self.calls: list[list[Query]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None
        self.short = False

    async def call(self, questions: Sequence[Query]) -> list[int]:
        self.calls.append(list(questions))
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return [sum(map(len, each)) for each in questions][self.short :]


async def test_those_of_one_turn_of_the_loop_go_together_and_each_has_its_own_answer():
    server = Server()
    together = QueryBatcher(server.call, 1.0)
    assert await asyncio.gather(*(together.ask((b"x" * n,)) for n in (3, 1, 2))) == [3, 1, 2]
    assert await together.ask((b"later",)) == 5
    assert [len(call) for call in server.calls] == [3, 1]


async def test_what_is_long_does_not_go_with_others():
    server = Server()
    together = QueryBatcher(server.call, 1.0)
    sizes = (1, MAX_BYTES, MAX_BYTES + 1, 2, 3)
    assert await asyncio.gather(*(together.ask((b"x" * n,)) for n in sizes)) == list(sizes)
    assert [[sum(map(len, each)) for each in call] for call in server.calls] == [
        [1],
        [MAX_BYTES],
        [MAX_BYTES + 1],
        [2, 3],
    ]


async def test_who_leaves_takes_nobodys_answer_along():
    server = Server()
    server.open.clear()
    together = QueryBatcher(server.call, 1.0)
    leaving, staying = (asyncio.create_task(together.ask((each,))) for each in (b"a", b"bc"))
    await asyncio.sleep(0.01)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    server.open.set()
    assert await staying == 2


async def test_nothing_is_asked_for_those_who_left_before():
    server = Server()
    together = QueryBatcher(server.call, 1.0)
    leaving = asyncio.create_task(together.ask((b"a",)))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert server.calls == []
    assert await together.ask((b"bc",)) == 2


async def test_an_error_is_told_to_each_in_its_kind():
    server = Server()
    server.error = RegistryFull("no room")
    together = QueryBatcher(server.call, 1.0)
    first, second = await asyncio.gather(together.ask((b"a",)), together.ask((b"b",)), return_exceptions=True)
    assert isinstance(first, RegistryFull)
    assert isinstance(second, RegistryFull)
    assert first is not second
    assert str(first) == str(second) == "no room"


async def test_an_answer_to_another_number_of_questions_is_none():
    server = Server()
    server.short = True
    with pytest.raises(RegistryUnavailable, match="invalid answer"):
        await QueryBatcher(server.call, 1.0).ask((b"a",))


async def test_nobody_waits_for_longer_than_the_limit():
    server = Server()
    server.open.clear()
    together = QueryBatcher(server.call, 0.05)
    with pytest.raises(RegistryUnavailable, match="within"):
        await together.ask((b"a",))
    await asyncio.sleep(0.02)
    assert together._calls == set(), "the call has ended, too"
