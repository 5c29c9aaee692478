"""A router survives whatever its nodes say: requests end by an output or a typed error, others do not notice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.messages import Deviation, FirstToken, StepFrame, TokenDelta, TokenLogprobs
from kvferry.protocol.wire import WireError, pack, unpack
from kvferry.router.nodes.message_validation import check_frame, suits
from tests.fake_workers import Bench, FakeWorker, collect, decode, expected, first_token, ids, prefill, ship_done
from tests.mutations import mutated

pytestmark = pytest.mark.usefixtures("twin")

REQUESTS = 60
ENDS_S = 20.0


@dataclass
class Damaging(FakeWorker):
    """One message in `every` is damaged."""

    rng: random.Random = field(default_factory=lambda: random.Random(5))
    every: int = 6

    def _packed(self, message: Any) -> bytes:
        return mutated(message, self.rng) if self.rng.randrange(self.every) == 0 else pack(message)

    async def _stream(self, request: Request) -> Response:
        queue: asyncio.Queue[StepFrame | None] = asyncio.Queue()
        self._queues[request.path_params["router"]] = queue

        async def body() -> AsyncIterator[bytes]:
            yield pack(StepFrame())
            while (frame := await queue.get()) is not None:
                yield self._packed(frame)

        return StreamingResponse(body(), media_type="application/msgpack")

    async def _prefill(self, request: Request) -> Response:
        message = unpack(await request.body())
        first = first_token(message.job)
        first = replace(first, delta=replace(first.delta, logprobs=(TokenLogprobs(3, -0.5, 1),)))

        async def body() -> AsyncIterator[bytes]:
            yield self._packed(first)
            if message.target:
                self.peers[message.target.node_id].decode(message.job, first.delta.index + 1)
                yield self._packed(ship_done(message.job))

        return StreamingResponse(body(), media_type="application/msgpack")


async def ended(bench: Bench) -> str:
    """How one request ends; it must."""
    async with asyncio.timeout(ENDS_S):
        try:
            outputs = await collect(bench.start(12, deadline_s=ENDS_S - 5))
        except KvferryError as error:
            return error.code
    assert len(ids(outputs)) == 12 or outputs[-1].finish_reason == "stop"
    return "done"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_damaged_messages_end_no_request_wrongly(seed: int) -> None:
    rng = random.Random(seed)
    damaging = [Damaging("p1", "prefill", rng=rng), Damaging("d1", "decode", rng=rng)]
    async with Bench([*damaging, prefill("p2"), decode("d2")]) as bench:
        found = [await asyncio.gather(*(ended(bench) for _ in range(10))) for _ in range(REQUESTS // 10)]
        codes = [code for codes in found for code in codes]
        assert codes.count("done") > REQUESTS * 0.8, codes
        assert "wire_error" not in codes, "a node's fault is not the client's"
        damaging[0].every = damaging[1].every = 10**9
        prompt = tuple(range(200, 264))
        answers = await asyncio.gather(*(collect(bench.start(8, prompt)) for _ in range(4)))
        assert all(ids(answer) == expected(prompt, 8) for answer in answers)


Speaks = Callable[[asyncio.StreamWriter], Any]
HTTP = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
SPOKEN: dict[str, bytes] = {
    "nothing": b"",
    "no http": b"\x16\x03\x01" * 99,
    "an upgrade": b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nabc",
    "a header that does not end": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10**6,
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10**5,
    "a chunk that is no frame": HTTP + b"5\r\n\xc1\xc1\xc1\xc1\xc1\r\n",
    "a chunk of a terabyte": HTTP + b"ffffffffff\r\n" + b"\xc0" * 10**5,
    "a frame of a gigabyte": HTTP + b"fffff\r\n\xc9\x3f\xff\xff\xff\x18" + b"\xc0" * 10**5,
    "a list of a billion": HTTP + b"5\r\n\xdd\xff\xff\xff\xff\r\n",
    "a refusal that is no json": b"HTTP/1.1 500 x\r\ncontent-length: 60000\r\n\r\n" + b"[" * 60000,
    "odd retry-after": b"HTTP/1.1 503 x\r\nretry-after: nan\r\ncontent-length: 2\r\n\r\n{}",
    "an odd error": b'HTTP/1.1 503 x\r\ncontent-length: 45\r\n\r\n{"error":{"code":[],"message":{},"param":[1]}}',
    "an answer and more": b"HTTP/1.1 202 x\r\ncontent-length: 0\r\n\r\n" * 50,
}  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("data", SPOKEN.values(), ids=SPOKEN)
async def test_a_node_that_speaks_anything_costs_itself_only(data: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(data)
        await asyncio.sleep(0.2)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with Bench([prefill("p2"), decode("d2")], silence_s=1.0) as bench:
        for role in ("prefill", "decode"):
            lease = replace(bench["p2"].lease if role == "prefill" else bench["d2"].lease, node_id=role, http_url=url)
            await bench.store.announce(lease)
        await asyncio.sleep(0.1)
        for _ in range(4):
            async with asyncio.timeout(ENDS_S):
                assert ids(await collect(bench.start(8))) == expected(tuple(range(100, 164)), 8)
    server.close()


NAMED: Any = ("p", "x")


@pytest.mark.parametrize("told", [None, [Deviation("r", ("p", 1))], (1,), (Deviation("r", NAMED),)])
def test_deviations_that_make_no_sense_break_their_stream(told: Any) -> None:
    with pytest.raises(WireError):
        check_frame(StepFrame(deviations=told))


def test_what_suits_a_job() -> None:
    from tests.toy import make_job

    job = make_job("a", [1, 2, 3], max_tokens=4)
    good = TokenDelta("a", 0, 0, (5, 6))
    assert suits(good, job)
    for changed in ({"token_ids": (5,) * 5}, {"index": 3}, {"logprobs": ()}, {"token_ids": ()}):
        assert not suits(replace(good, **changed), job), changed
    assert not suits(replace(good, prompt_logprobs=(None,)), job)
    assert isinstance(unpack(pack(FirstToken(good, 0.0, 0.0))), FirstToken)
