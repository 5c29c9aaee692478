"""Mock prefill and decode nodes without a model, for measuring a router in front of them.

    python -m benchmarks.mock_nodes prefill --redis-url redis://...

They speak the nodes' protocol, keep a lease, and answer at once with computed tokens. A prefill node hands a job to its
decode node over a TCP connection to that node's link address, where real nodes ship KV. A seed below a million is a
request's pace, in microseconds between two tokens. The process ends when its standard input does."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict

import uvloop

from benchmarks.mock_http import HOST, Exchange
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.registry import LeaseKeeper
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.lease import Load, NodeLease, Rates
from kvferry.protocol.messages import FirstToken, GenerateRequest, Job, PrefillRequest, ShipDone, StepFrame, TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.wire import FrameReader, pack, unpack
from kvferry.runtime.address import parse_host_port

MODEL = "mock"
"""Name of the model that the nodes report."""
MAX_MODEL_LEN, BLOCK_SIZE, BLOCKS = 131072, 16, 1_000_000
HEARTBEAT_S = 0.4
SLOWEST_STEP_S = 1.0
"""Step time that the lease reports, in seconds: no request asks for tokens further apart."""
WORDS, STRIDE = range(1000, 40000), 7919
"""Tokens of plain words in the vocabularies of today's models, and the distance between two consecutive tokens."""


def delta(job: Job, index: int) -> TokenDelta:
    """Return output token `index`; with the first one, the origin of the prompt's blocks."""
    reason = "length" if index + 1 == job.params.max_tokens else None
    reuse = Reuse(job.prompt_len, computed=job.prompt_len) if index == 0 else None
    token = WORDS[(job.prompt_len + index) * STRIDE % len(WORDS)]
    return TokenDelta(job.request_id, job.attempt, index, (token,), finish_reason=reason, reuse=reuse)


def pace_s(job: Job) -> float:
    """Return the seconds between two tokens; routers draw default seeds from far more than a million."""
    seed = job.params.seed or 0
    return seed / 1e6 if seed < 1e6 else 0.0


class Streams:
    """Long-lived token streams of the routers; frames are not kept, so a broken stream cannot resume."""

    def __init__(self) -> None:
        self.open: dict[str, Exchange] = {}

    def take(self, path: str, exchange: Exchange) -> bool:
        """Handle a request about a stream, or refuse one for leases; return whether it was one."""
        if path == "/leases":
            exchange.send(b"", "404 Not Found")
            return True
        if not path.startswith("/streams/"):
            return False
        router, _, rest = path.removeprefix("/streams/").partition("?")
        if router.endswith("/seen") or "after=" in rest:
            exchange.send(b"", "503 Service Unavailable" if rest else "202 Accepted")
            return True
        self.open[router] = exchange
        exchange.begin()
        exchange.chunk(pack(StepFrame()))
        return True

    def beat(self) -> None:
        """Send a heartbeat on each stream."""
        for stream in self.open.values():
            if not stream.closed:
                stream.chunk(pack(StepFrame()))


class MockPrefill:
    """Samples the first token of every prompt at once and hands over the rest."""

    def __init__(self) -> None:
        self._streams = Streams()
        self._links: dict[str, asyncio.Transport] = {}
        self._background_calls: set[asyncio.Task[None]] = set()

    def answer(self, path: str, body: bytes, exchange: Exchange) -> None:
        """Answer any request of a router."""
        if self._streams.take(path, exchange):
            return
        message = unpack(body)
        if not isinstance(message, PrefillRequest):
            exchange.send(b"")
            return
        job, target = message.job, message.target
        first = FirstToken(delta(job, len(job.token_ids) - job.prompt_len), 0.0, 0.0)
        exchange.begin()
        exchange.chunk(pack(first))
        if target is None or first.delta.finish_reason:
            exchange.chunk(b"")
            return
        background_call = asyncio.create_task(self._ship(job, target.link_address, exchange))
        self._background_calls.add(background_call)
        background_call.add_done_callback(self._background_calls.discard)

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._streams.beat()

    async def _ship(self, job: Job, address: str, exchange: Exchange) -> None:
        if address not in self._links:
            host, port = parse_host_port(address)
            loop = asyncio.get_running_loop()
            self._links[address], _ = await loop.create_connection(asyncio.Protocol, host, port)
        self._links[address].write(pack(job))
        blocks = blocks_for(job.prompt_len, BLOCK_SIZE)
        exchange.chunk(pack(ShipDone(job.request_id, job.attempt, blocks, 0, 0.0, 0.0)))
        exchange.chunk(b"")


class MockDecode:
    """Makes one token of each job per step, in one frame per router.

    The job with the shortest pace sets a step's length."""

    def __init__(self) -> None:
        self._streams = Streams()
        self._jobs: dict[str, tuple[Job, int]] = {}
        self._arrived = asyncio.Event()

    def answer(self, path: str, body: bytes, exchange: Exchange) -> None:
        """Answer any request of a router."""
        if self._streams.take(path, exchange):
            return
        message = unpack(body)
        exchange.send(b"")
        if isinstance(message, GenerateRequest):
            self._add(message.job, 0)
        else:
            self._jobs.pop(message.request_id, None)

    def link(self) -> asyncio.Protocol:
        """Return the receiving end of a prefill node's connection."""
        return _Link(self)

    def take(self, job: Job) -> None:
        """Take over a job after its first token."""
        self._add(job, 1)

    async def run(self) -> None:
        """Run steps until cancelled, and send heartbeats while there is nothing to do."""
        while True:
            try:
                await asyncio.wait_for(self._arrived.wait(), HEARTBEAT_S)
            except TimeoutError:
                self._streams.beat()
            while self._jobs:
                await self._pause(min(pace_s(job) for job, _ in self._jobs.values()))
                await self._send(self._step())
            self._arrived.clear()

    async def _pause(self, seconds: float) -> None:
        """Sleep while sending heartbeats: a router abandons a silent node."""
        while seconds > HEARTBEAT_S:
            await asyncio.sleep(HEARTBEAT_S)
            self._streams.beat()
            seconds -= HEARTBEAT_S
        await asyncio.sleep(seconds)

    def _add(self, job: Job, produced: int) -> None:
        self._jobs[job.request_id] = (job, len(job.token_ids) - job.prompt_len + produced)
        self._arrived.set()

    def _step(self) -> dict[str, StepFrame]:
        deltas: dict[str, list[TokenDelta]] = defaultdict(list)
        for key, (job, index) in list(self._jobs.items()):
            token = delta(job, index)
            deltas[job.router_id].append(token)
            if token.finish_reason:
                del self._jobs[key]
            else:
                self._jobs[key] = (job, index + 1)
        return {router: StepFrame(tuple(found)) for router, found in deltas.items()}

    async def _send(self, frames: dict[str, StepFrame]) -> None:
        for router, frame in frames.items():
            stream = self._streams.open.get(router)
            if stream is None or stream.closed:
                self._streams.open.pop(router, None)
                self._jobs = {key: value for key, value in self._jobs.items() if value[0].router_id != router}
            else:
                stream.chunk(pack(frame))
                await stream.writable.wait()


class _Link(asyncio.Protocol):
    def __init__(self, node: MockDecode) -> None:
        self._node, self._reader = node, FrameReader()

    def data_received(self, data: bytes) -> None:
        for job in self._reader.feed(data):
            self._node.take(job)


async def serve(role: str, redis_url: str) -> None:
    """Serve as a node of `role` until the standard input ends."""
    loop = asyncio.get_running_loop()
    decode = MockDecode()
    node = decode if role == "decode" else MockPrefill()
    http = await loop.create_server(lambda: Exchange(node.answer), HOST, 0)
    link = await loop.create_server(decode.link, HOST, 0)
    lease = NodeLease(
        f"mock-{role}", role, 1, "ready", f"http://{_address(http)}", _address(link), "mock", MODEL,
        MAX_MODEL_LEN, BLOCK_SIZE, 1, Load(free_blocks=BLOCKS, total_blocks=BLOCKS), Rates(step_s=SLOWEST_STEP_S),
    )  # fmt: skip
    store = RedisStore(redis_url, "default")
    keeper = LeaseKeeper(store, lambda: lease)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    keeper.start()
    try:
        await next(asyncio.as_completed((node.run(), ended.wait())))
    finally:
        await keeper.stop()
    await store.close()


def _address(server: asyncio.Server) -> str:
    return f"{HOST}:{server.sockets[0].getsockname()[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--redis-url", required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.role, options.redis_url))


if __name__ == "__main__":
    main()
