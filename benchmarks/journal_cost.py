"""Measures the CPU time that event ids and the recording of requests in journals cost a router.

    python -m benchmarks.journal_cost [--redis-url URL]

Streams of one token an event, 12 tokens each between two writes, as with 20 ms a token. Without a URL the store is in
this process, and the writes show the router's part without its Redis client."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry

from kvferry.cluster_state.journals import Journals
from kvferry.cluster_state.memory_journals import MemoryJournals
from kvferry.cluster_state.redis_journals import RedisJournals
from kvferry.cluster_state.seal import Seal
from kvferry.protocol.journal_metrics import JournalMetrics
from kvferry.router.api.sse import TextEvent
from kvferry.router.dispatch.interface import Output
from kvferry.router.journal.event_ids import EventIds
from kvferry.router.journal.open_journal import CloseMode, OpenJournal
from kvferry.router.journal.recording import JournalHead
from kvferry.router.journal.writer import JournalWriter
from kvferry.router.request_context import RequestIdentity

STREAMS, ROUNDS, TOKENS = 256, 20, 12
"""Streams, writes, and tokens of a stream between two writes."""
BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"' + b"word " * 200 + b'"}]}'
SHAPE = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef",
    "choices": [{"index": 0, "delta": {"content": TextEvent.SLOT}}],
}


def spent(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def record(streams: list[OpenJournal], output: Output) -> None:
    """Record what the streams deliver between two writes."""
    for stream in streams:
        for _ in range(TOKENS):
            stream.pending.add(0, output)


async def measured(journals: Journals) -> list[list[str]]:
    """Return the table's rows."""
    writer = JournalWriter(journals, "bench", JournalMetrics(CollectorRegistry()), max_bytes=2**20)
    event, output, tokens = TextEvent(SHAPE), Output((4242,)), STREAMS * ROUNDS * TOKENS
    ids = [EventIds(f"chatcmpl-{secrets.token_hex(16)}.{secrets.token_hex(4)}", 1) for _ in range(STREAMS)]
    began = time.process_time()
    streams = []
    for number in range(STREAMS):
        head = JournalHead("/v1/chat/completions", BODY, secrets.token_hex(16), RequestIdentity.new(), 600.0)
        streams.append(OpenJournal("tenant", f"stream-{number}", 60.0, head=head.packed()))
        writer.begin(streams[-1])
    await writer.flush()
    request_s = time.process_time() - began
    plain_s = spent(lambda: [event.fill(" word") for _ in range(tokens)])
    marked_s = spent(lambda: [each.mark(0, 1, event.fill(" word")) for each in ids for _ in range(tokens // STREAMS)])
    record_s = write_s = 0.0
    for _ in range(ROUNDS):
        record_s += spent(partial(record, streams, output))
        began = time.process_time()
        await writer.flush()
        write_s += time.process_time() - began
    began = time.process_time()
    for stream in streams:
        writer.close(stream, CloseMode.END)
    await writer.flush()
    request_s += time.process_time() - began
    rows = [("ids of events", marked_s - plain_s), ("recording", record_s), ("writing", write_s)]
    cells = [[name, f"{seconds / tokens * 1e6:.2f} µs a token"] for name, seconds in rows]
    cells.append(["all of them", f"{sum(seconds for _, seconds in rows) / tokens * 1e6:.2f} µs a token"])
    return [*cells, ["opening and ending", f"{request_s / STREAMS * 1e3:.3f} ms a request"]]


async def main(url: str) -> None:
    """Measure and print."""
    key = secrets.token_bytes(32)
    seal = Seal(lambda: [key])
    journals = RedisJournals(url, "bench", share=2**30, seal=seal) if url else MemoryJournals(share=2**30)
    for row in (["part", "CPU"], ["---", "---"], *await measured(journals)):
        print(f"| {' | '.join(row)} |")
    await journals.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis-url", default="", help="Redis or Valkey that keeps the journals")
    asyncio.run(main(parser.parse_args().redis_url))
